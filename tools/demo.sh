#!/bin/sh
# tools/demo.sh [my.txt]: goes on training examples/shakespeare, a model of 2.7M parameters that the repository has, with a text (by default Debian's
# fortunes). It scores what was held out, generates text before and after, and looks inside. Called by `make demo`, which has built build-demo/fastweight.
set -eu
text=${1:-}
case $text in ''|/*) ;; *) text=$PWD/$text ;; esac
cd "$(dirname "$0")/.."
program=${FW_DEMO_PROGRAM:-build-demo/fastweight}
model=examples/shakespeare

# An earlier demo is kept: every run has a folder of its own.
run=demo/run
number=1
while [ -e "$run" ]; do
  number=$((number + 1))
  run=demo/run-$number
done
mkdir -p demo

separator=""
if [ -n "$text" ]; then
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
# Products of bf16 are fast where the processor has them, and slow elsewhere.
precision=f32
case $($program info) in *avx512_bf16*|*amx_bf16*) precision=bf16 ;; esac

echo
echo "== train: $model goes on with $text"
status=0
$program train --from $model --text "$text" --separator "$separator" --valid-fraction 0.02 --steps 60 --lr 2e-3 --warmup 10 --eval-every 30 \
  --precision $precision --out "$run" || status=$?
# Ctrl-C: the program has said how to go on.
[ $status -ne 130 ] || exit 130
[ $status -eq 0 ] || { echo "make demo: training failed with exit code $status (its message is above)" >&2; exit $status; }

echo
echo "== eval: the text that was held out, before and after the training"
$program eval $model --text "$run/data/valid.tokens" --context 256
$program eval "$run" --text "$run/data/valid.tokens" --context 256
$program analyze "$run" --text "$run/data/valid.tokens" --tokens 1024 --out "$run/analysis" > "$run/analysis.txt" || tail -n 1 "$run/analysis.txt"

echo
echo "== text of the model before: it knows Shakespeare's plays"
$program generate $model --prompt "KING RICHARD III:" --tokens 120 --temperature 0.6 --top-p 0.8 --seed 1
echo
echo
echo "== text of the model after a minute with $text"
if [ "$separator" = % ]; then
  # A quotation begins after the line "%", which is left out of what is shown.
  for begin in "Love is" "Life is" "Never trust"; do
    $program generate "$run" --prompt "$(printf '\n%s' "$begin")" --tokens 60 --temperature 0.5 --top-p 0.8 --seed 1 --stop "$(printf '\n%%')"
    printf '\n%%'
  done
  echo
else
  $program generate "$run" --tokens 200 --temperature 0.6 --top-p 0.8 --seed 1
  echo
fi
echo
# A recurrence remembers as much at the first token as at any other: what a token costs does not grow with the text.
state=$($program info "$run" --json | sed -n 's/.*"state_bytes": *\([0-9]*\).*/\1/p' | head -n 1)
$program generate "$run" --tokens 1000 --seed 1 --ignore-end --json | perl -ne '
  if (/"seconds": *([0-9.e+-]+)/) { $seconds = $1 }
  END {
    printf "generated 1000 tokens at %.0f us each; state %.0f kB at token 1 and at token 100,000\n", 1000 * $seconds, '"${state:-0}"' / 1000;
  }'
for picture in "$run/analysis/decay.png" "$run/analysis/decay.svg"; do
  [ ! -f "$picture" ] || { echo "picture of what each head keeps from token to token: $picture"; break; }
done
echo
echo "Next:"
echo "  $program generate $run --prompt \"Love is\" --tokens 100 --temperature 0.7"
echo "  $program train recipes/demo.toml --text \"$text\" --rule kda --out demo/kda     # from nothing, with another rule"
echo "  $program sweep mqar --small --out demo/mqar     # what rules can recall"
