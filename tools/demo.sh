#!/bin/sh
# tools/demo.sh [my.txt]: trains a small model on a text (by default Debian's fortunes), scores what was held out, writes a
# few lines of its own and names every file it made. Called by `make demo`, which has built build/fastweight.
set -eu
text=${1:-}
case $text in ''|/*) ;; *) text=$PWD/$text ;; esac
cd "$(dirname "$0")/.."
program=build/fastweight

# An earlier demo is kept: every run has a folder of its own.
run=demo/run
number=1
while [ -e "$run" ]; do
  number=$((number + 1))
  run=demo/run-$number
done
mkdir -p demo

if [ -n "$text" ]; then
  separator=""
  if [ ! -f "$text" ]; then
    echo "make demo: TEXT: expected a text file, but '$text' is none" >&2
    exit 2
  fi
  # A fortune file of one's own: quotations that lines "%" end.
  if grep -qx '%' "$text"; then separator=%; fi
else
  text=demo/fortunes.txt
  separator=%
  tools/fortunes.pl > "$text.new"
  mv "$text.new" "$text"
fi

echo "== train ($text)"
status=0
$program train recipes/demo.toml --text "$text" --separator "$separator" --out "$run" || status=$?
# Ctrl-C: the program has said how to go on.
[ $status -ne 130 ] || exit 130
[ $status -eq 0 ] || { echo "make demo: training failed with exit code $status (its message is above)" >&2; exit $status; }

echo
echo "== eval: the text that was held out, read in pieces of 256 and 1024 tokens"
$program eval "$run" --text "$run/data/valid.tokens" --context 256,1024

echo
echo "== generate"
if [ "$separator" = % ]; then
  for seed in 1 2 3 4; do
    # The line "%" before it tells the model that a new quotation begins; it is left out of what is kept.
    $program generate "$run" --tokens 400 --temperature 0.7 --top-p 0.95 --seed $seed --stop "$(printf '\n%%')"
    printf '\n%%\n'
  done > "$run/generated.txt"
else
  $program generate "$run" --tokens 600 --temperature 0.7 --top-p 0.95 --seed 1 > "$run/generated.txt"
  echo >> "$run/generated.txt"
fi
cat "$run/generated.txt"

echo
echo "== made by this demo"
say() { printf '  %-36s %s\n' "$1" "$2"; }
[ "$text" != demo/fortunes.txt ] || say "$text" "the text: all quotations of the package fortunes, mixed"
say "$run/model/" "the model: config.json, model.safetensors, tokenizer.json"
for curve in "$run/loss.png" "$run/loss.svg"; do
  if [ -f "$curve" ]; then say "$curve" "the loss curve"; fi
done
say "$run/metrics.csv, metrics.jsonl" "loss, norm, rate and speed of every log interval"
say "$run/generated.txt" "what the model wrote"
say "$run/config.toml" "the run: build/fastweight train with this file repeats it"
say "$run/checkpoints/, data/" "checkpoints for --resume, the text as tokens"
echo
echo "More of it: $program generate $run --prompt \"Love is\" --tokens 300 --temperature 0.8"
