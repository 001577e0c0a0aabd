#!/bin/sh
# tools/demo.sh [my.txt]: trains a small model on a text (by default Debian's fortunes), scores what was held out, writes a few lines of its own, looks inside,
# and names the files that matter. Called by `make demo`, which has built build-demo/fastweight.
set -eu
text=${1:-}
case $text in ''|/*) ;; *) text=$PWD/$text ;; esac
cd "$(dirname "$0")/.."
program=${FW_DEMO_PROGRAM:-build-demo/fastweight}

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

# Pieces of words make text readable after a minute of training. A short text has too few words for them: bytes.
tokenizer=bytes
pieces=$run.pieces.model
if [ "$(wc -c < "$text")" -ge 400000 ]; then
  echo "== tokenizer: 2000 pieces of words, learnt from the text"
  if $program tokenize "$text" --train-sentencepiece --vocab 2000 --model-type bpe --out "$pieces"; then tokenizer=$pieces; fi
fi
# Products of bf16 are fast where the processor has them, and slow elsewhere.
precision=f32
case $($program info) in *avx512_bf16*|*amx_bf16*) precision=bf16 ;; esac

echo
echo "== train ($text)"
status=0
$program train recipes/demo.toml --text "$text" --separator "$separator" --tokenizer "$tokenizer" --precision $precision --out "$run" || status=$?
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
    $program generate "$run" --tokens 120 --temperature 0.7 --top-p 0.9 --seed $seed --stop "$(printf '\n%%')"
    printf '\n%%\n'
  done > "$run/generated.txt"
else
  $program generate "$run" --tokens 200 --temperature 0.7 --top-p 0.9 --seed 1 > "$run/generated.txt"
  echo >> "$run/generated.txt"
fi
cat "$run/generated.txt"
echo
# A recurrence remembers as much at the first token as at any other: what a token costs does not grow with the text.
state=$($program info "$run" --json | sed -n 's/.*"state_bytes": *\([0-9]*\).*/\1/p' | head -n 1)
$program generate "$run" --tokens 1000 --seed 1 --ignore-end --json | perl -ne '
  if (/"seconds": *([0-9.e+-]+)/) { $seconds = $1 }
  END {
    printf "generated 1000 tokens at %.0f us each; state %.0f kB at token 1 and at token 100,000\n", 1000 * $seconds, '"${state:-0}"' / 1000;
  }'

echo
echo "== look inside: the decay of every head, one panel for each layer and head"
if $program analyze "$run" --text "$run/data/valid.tokens" --tokens 2048 --out "$run/analysis" > "$run/analysis.txt"; then
  ls "$run"/analysis/decay*.png 2> /dev/null | head -n 1
else
  tail -n 1 "$run/analysis.txt"
fi

echo
echo "== made by this demo"
say() { printf '  %-36s %s\n' "$1" "$2"; }
say "$run/model/" "the model: config.json, model.safetensors and its tokenizer"
for curve in "$run/loss.png" "$run/loss.svg"; do
  if [ -f "$curve" ]; then say "$curve" "the loss curve"; fi
done
say "$run/analysis/" "gates, eigenvalues, reads and states of every head, as pictures and numbers"
say "$run/generated.txt" "what the model wrote"
say "$run/config.toml" "the run: 'fastweight train' with this file repeats it"
echo
echo "Next:"
echo "  $program generate $run --prompt \"Love is\" --tokens 100 --temperature 0.8"
echo "  $program train recipes/demo.toml --text $text --rule kda --out demo/kda && $program curves $run demo/kda --out demo/rules"
echo "  $program sweep mqar --small --out demo/mqar"
