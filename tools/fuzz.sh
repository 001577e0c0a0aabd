#!/bin/sh
# Runs every libFuzzer target of build-fuzz, two at a time, SECONDS (60) each, from its corpus tests/fuzz/corpus/<name> and with the
# words of tests/fuzz/dictionaries/<name> where there are some.
# What it learns stays in build-fuzz/corpus/<name>; an input that fails is left in build-fuzz/ and named.
set -eu
seconds=${1:-60}
cd "$(dirname "$0")/.."
targets=$(find build-fuzz/tests -maxdepth 1 -type f -name 'fuzz_*' -perm -u+x | sort)
[ -n "$targets" ] || { echo "fuzz: no target in build-fuzz/tests (make fuzz builds them)" >&2; exit 1; }
one='
  name=$(basename "$0"); seconds=$1
  mkdir -p "build-fuzz/corpus/$name"
  seeds=""; [ ! -d "tests/fuzz/corpus/$name" ] || seeds="tests/fuzz/corpus/$name"
  words=""; [ ! -f "tests/fuzz/dictionaries/$name" ] || words="-dict=tests/fuzz/dictionaries/$name"
  # 1 GB of memory and 10 s an input: a reader that needs more of either for a small file is a defect.
  if "$0" -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 $words -artifact_prefix="build-fuzz/$name-" \
      "build-fuzz/corpus/$name" $seeds > "build-fuzz/$name.log" 2>&1; then
    echo "fuzz: $name: $(sed -n "s/^stat::number_of_executed_units: *//p" "build-fuzz/$name.log") inputs in $seconds s, no failure"
  else
    tail -n 60 "build-fuzz/$name.log" >&2
    echo "fuzz: $name failed; the input is the file named above, run $0 FILE to see it again" >&2
    exit 1
  fi'
printf '%s\n' "$targets" | xargs -d '\n' -P "$(nproc)" -I '{}' sh -c "$one" '{}' "$seconds"
