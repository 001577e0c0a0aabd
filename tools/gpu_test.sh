#!/bin/bash
# Tests of device code on this machine's GPU: every program of the label gpu, selftest, then compute-sanitizer's four tools over the
# small shapes of each kernel.
#   tools/gpu_test.sh BUILD_FOLDER [--no-sanitizer]
# Prints one line a program and exits 1 if any failed; 77 (no GPU) counts as failed here.
set -u
build=$1
failed=0
run() {
  local name=$1
  shift
  local log start=$SECONDS
  log=$(mktemp)
  if "$@" > "$log" 2>&1; then
    echo "ok      $name ($((SECONDS - start)) s)"
  else
    echo "FAILED  $name (status $?, $((SECONDS - start)) s)"
    tail -n 40 "$log"
    failed=1
  fi
  rm -f "$log"
}

for program in "$build"/tests/*_test "$build"/tests/test_cuda; do
  case $(basename "$program") in *_emulated) continue ;; esac
  [ -x "$program" ] && run "$(basename "$program")" "$program"
done
run selftest "$build/fastweight" selftest --device cuda

if [ "${2:-}" != --no-sanitizer ]; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  for tool in memcheck racecheck synccheck initcheck; do
    run "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 --leak-check no "$build/tests/test_cuda" --gtest_filter='Small.*'
  done
fi
exit $failed
