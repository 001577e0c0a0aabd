#!/bin/bash
# tools/torture.sh [MINUTES] [PROGRAM]: what users, schedulers and machines do to the program, at random, for so many minutes
# (default 5): signals and kill -9 at any moment, damaged files, full disks, two processes on one folder, readers that go away.
# What is checked (docs/robustness.md): every end has a documented exit code; the newest checkpoint never becomes older; a run
# that was interrupted and resumed ends in the bits, the records and the files of one that nobody disturbed; state and token
# files are the old or the new ones, never a part; temporary files do not stay; sweeps, imports and evaluations that end together,
# are damaged or are interrupted; nothing that is read is replaced; no name is a command. Ends with counts; exit code 1 if anything was
# crashed, lost or torn, and then what it was stays in the folder that is named. SEED=N repeats the choices, not the moments.
# As root on Linux full disks are small tmpfs; else, and in between, limits on the size of files.
set -uo pipefail
minutes=${1:-5}
program=$(realpath "${2:-$(dirname "$0")/../build/fastweight}") || exit 2
[ -x "$program" ] || { echo "torture.sh: no program '$program': build it first, or give its path" >&2; exit 2; }
[[ $minutes =~ ^[0-9]+$ ]] || { echo "torture.sh: MINUTES: expected a whole number, got '$minutes'" >&2; exit 2; }
seed=${SEED:-$((RANDOM + 1))}
RANDOM=$seed
work=$(mktemp -d "${TMPDIR:-/tmp}/fastweight-torture-XXXXXX")
disk=$work/disk
mkdir "$work/tmp" "$disk" "$work/faults"
export TMPDIR=$work/tmp
log=$work/log  # what the shell itself says of processes that were killed
exec 3>&1 4>&2 2>>"$log"
trap 'kill "$watch"; umount "$disk"' EXIT
declare -A count=()
# So small that a round takes a moment; the kernels are oneDNN's all the same.
declare -a config=(train --steps 16 --batch 2 --length 16 --warmup 2 --log-every 4 --checkpoint-every 3 --eval-every 6 --hidden-size 16
  --num-hidden-layers 1 --num-heads 1 --head-dim 16 --threads 2 --seed 3)

declare -a sweep=(sweep palindrome --rule mamba2,kda --length 4 --lengths 4 --steps 4 --batch 4 --judged 4 --eval-every 2 --hidden-size 8
  --num-heads 1 --head-dim 8 --intermediate-size 8 --threads 1)

add() { count[$1]=$((${count[$1]:-0} + 1)); }
below() { r=$((((RANDOM << 15) | RANDOM) % $1)); }  # into r, as a subshell would not move the generator on
pick() { below $#; shift "$r"; picked=$1; }
pause() { below "$1"; sleep "$((r / 1000)).$(printf %03d $((r % 1000)))"; }  # up to so many milliseconds

# fault KIND TEXT: keeps what is needed to understand it.
fault() {
  add "$1"
  local kept=$work/faults/$1-${count[$1]}
  mkdir "$kept"
  cp -r "$work/out" "$work/err" "$work/run" "$kept"
  printf '%s\n' "$2" "command: ${command[*]:-}" "exit code: ${code:-}" | tee "$kept/what" >&3
}

start() {
  command=("$@")
  "$program" "$@" >"$work/out" 2>"$work/err" </dev/null &
  pid=$!
}
# Into code; "hang" if the watch had to end it.
finish() {
  echo "$pid" >"$work/current"
  wait "$pid"
  code=$?
  if [ -e "$work/hung-$pid" ]; then code=hang; fi
}
# Ends a program that is waited for in five looks.
watch() {
  local looks=0 last='' now
  while sleep 30; do
    now=$(<"$work/current")
    if [ "$now" = "$last" ]; then ((++looks)); else looks=0; fi
    last=$now
    if ((looks >= 4)) && kill -0 "$now"; then
      touch "$work/hung-$now"
      kill -9 "$now"
    fi
  done
}
# ended CODE...: what the end may have been.
ended() {
  local allowed
  for allowed in "$@"; do [ "$code" = "$allowed" ] && return 0; done
  case $code in
    hang) fault hangs "no end within two minutes" ;;
    3 | 13[1-6] | 139 | 159) fault crashes "ended by a fault" ;;
    *) fault "wrong exit codes" "expected one of: $*" ;;
  esac
  return 1
}
run() { start "$@"; finish; }

# The step of the newest checkpoint; -1: none.
newest() {
  local path step=-1
  for path in "$1"/checkpoints/step-*; do
    [[ $path =~ /step-([0-9]+)$ ]] && ((BASH_REMATCH[1] > step)) && step=${BASH_REMATCH[1]}
  done
  echo "$step"
}
records() { sed -E 's/"(ms|tokens_per_second|time)":[^,}]*,?//g' "$1/metrics.jsonl"; }
# Into args: the training run in this folder, gone on with where there is a checkpoint.
training() {
  args=("${config[@]}" --text "$work/text" --valid "$work/held-out" --out "$1")
  if [ "$(newest "$1")" -ge 0 ]; then args+=(--resume); fi
}
files() { (cd "$1" && find . -path ./data -prune -o -print | sort); }

# Of a run that was interrupted and has come to its end: it must be the one that nobody disturbed.
compare() {
  add "runs taken to their end"
  cmp -s "$1/model/model.safetensors" "$work/whole/model/model.safetensors" || fault torn "the model differs from that of an undisturbed run"
  [ "$(records "$1")" = "$(records "$work/whole")" ] || fault lost "the records differ from those of an undisturbed run"
  [ "$(files "$1")" = "$(files "$work/whole")" ] || fault litter "other files than an undisturbed run: $(diff <(files "$1") <(files "$work/whole"))"
}
# To the end, whatever was before.
complete() {
  training "$1"
  run "${args[@]}"
  ended 0 && compare "$1"
}
# hit SIGNAL: to the program that runs.
hit() { kill -s "$1" "$pid"; }

interrupts() {
  local out=$work/run hits before now said signal
  rm -rf "$out"
  for ((hits = 0; hits < 12; ++hits)); do
    before=$(newest "$out")
    training "$out"
    start "${args[@]}"
    pause "$span"
    pick KILL KILL KILL INT INT TERM HUP ALRM
    signal=$picked
    hit "$signal"
    below 6
    if [ "$r" = 0 ]; then sleep 0.25; hit INT; fi
    finish
    [ "$code" = 0 ] && break
    if [ "$code" = 137 ]; then add "kill -9"; else add "signals ($signal)"; fi
    case $signal in
      KILL) ended 137 ;;
      ALRM) ended 142 130 ;;  # nobody handles it: the end by the signal itself
      *) ended $((128 + $(kill -l "$signal"))) 130 4 ;;
    esac
    now=$(newest "$out")
    if ((now < before)); then fault lost "the newest checkpoint was of step $before and is of step $now"; fi
    said=$(sed -n 's/^stopped at step \([0-9]*\) .*the checkpoint is written.*/\1/p' "$work/out")
    if [ -n "$said" ] && ((now != said)); then fault lost "a checkpoint of step $said was said to be written, the newest is of step $now"; fi
  done
  complete "$out"
}

damage() {
  local file=$1 size
  size=$(stat -c %s "$file")
  pick cut flip flip flip append empty remove zero
  case $picked in
    cut) below $((size + 1)); truncate -s "$r" "$file" ;;
    flip) below $((size + 1)); head -c $((RANDOM % 16 + 1)) /dev/urandom | dd of="$file" bs=1 seek="$r" conv=notrunc ;;
    append) head -c $((RANDOM % 4096 + 1)) /dev/urandom >>"$file" ;;
    empty) : >"$file" ;;
    remove) rm "$file" ;;
    zero) below $((size + 1)); dd if=/dev/zero of="$file" bs=1 count=512 seek="$r" conv=notrunc ;;
  esac
}
damaged() {
  local out=$work/run
  rm -rf "$out"
  cp -r "$work/half" "$out"
  mapfile -t of < <(cd "$out" && find . -type f | sort)
  pick "${of[@]}"
  local name=$picked
  damage "$out/$name"
  add "damaged files"
  case $name in
    ./model/*)
      pick generate eval export
      case $picked in
        generate) run generate "$out" --tokens 5 --threads 1 ;;
        eval) run eval "$out" --text "$work/text" --threads 1 ;;
        export) rm -rf "$work/exported"; run export "$out" "$work/exported" ;;
      esac
      ended 0 1 2 ;;
    ./state)
      run generate "$out" --tokens 5 --state-load "$out/state" --threads 1
      ended 0 2 ;;
    *)
      training "$out"
      run "${args[@]}"
      ended 0 1 2 || return
      # A checkpoint that is damaged is passed over for the one before it, so that the result is the same.
      if [ "$code" = 0 ] && [[ $name == ./checkpoints/* ]]; then
        cmp -s "$out/model/model.safetensors" "$work/whole/model/model.safetensors" || fault torn "went on from a damaged checkpoint ($name, $picked)"
      fi ;;
  esac
  if [ "$code" = 0 ]; then add "damaged files survived"; else add "damaged files refused"; fi
}

full_disk() {
  local out=$work/run kib
  rm -rf "$out"
  below 250
  kib=$((r + 8))
  add "full disks and limits"
  if ((RANDOM % 2)) && mount -t tmpfs -o size=${kib}k none "$disk"; then
    training "$disk/run"
    run "${args[@]}"
    ended 0 2
    cp -r "$disk/run" "$out"
    umount "$disk"
  else
    training "$out"
    command=(ulimit -f "$kib" "${args[@]}")
    (ulimit -f "$kib"; exec "$program" "${args[@]}") >"$work/out" 2>"$work/err" </dev/null &
    pid=$!
    finish
    ended 0 2
  fi
  if [ "$code" = 2 ] && ! grep -qE 'No space left on device|File too large' "$work/err"; then fault "wrong exit codes" "the error does not say why"; fi
  complete "$out"
}

two_processes() {
  local out=$work/run first
  rm -rf "$out"
  training "$out"
  start "${args[@]}"
  first=$pid
  for ((i = 0; i < 200; ++i)); do [ -e "$out/.lock" ] && break; sleep 0.005; done
  pause "$span"
  training "$out"
  run "${args[@]}"
  add "second processes"
  # It is refused while the first lives; after its end there is nothing to do, or a run that is complete.
  if kill -0 "$first"; then ended 2; else ended 0 2; fi
  if ((RANDOM % 2)) && kill -9 "$first"; then add "kill -9"; fi
  pid=$first
  finish
  ended 0 137
  complete "$out"
}

state_files() {
  local state=$work/state signal
  cp "$work/half/state" "$state"
  start generate "$work/whole" --tokens 300 --threads 1 --state-load "$state" --state-save "$state"
  pause 60
  pick KILL INT TERM
  signal=$picked
  hit "$signal"
  finish
  ended 0 $((128 + $(kill -l "$signal")))
  if [ "$code" = 137 ]; then add "kill -9"; elif [ "$code" != 0 ]; then add "signals ($signal)"; fi
  run generate "$work/whole" --tokens 3 --threads 1 --state-load "$state"
  ended 0 || fault torn "a state file"
}

token_files() {
  local tokens=$work/tokens
  rm -f "$tokens"
  start tokenize "$work/long-text" --out "$tokens"
  pause "$tokenize_span"
  pick KILL INT
  hit "$picked"
  finish
  ended 0 $((128 + $(kill -l "$picked")))
  if [ "$code" = 137 ]; then add "kill -9"; elif [ "$code" != 0 ]; then add "signals ($picked)"; fi
  if [ -e "$tokens" ] && ! cmp -s "$tokens" "$work/whole-tokens"; then fault torn "a token file"; fi
  rm -f "$tokens"*
}

evaluations() {
  start eval "$work/whole" --text "$work/long-text" --threads 2
  pause 300
  pick INT TERM HUP
  hit "$picked"
  finish
  ended 0 $((128 + $(kill -l "$picked")))
  if [ "$code" != 0 ]; then add "signals ($picked)"; fi
  if [ -n "$(ls -A "$TMPDIR")" ]; then
    # Between making a file and taking away its name there is a moment in which the handlers do not stand yet.
    fault litter "temporary files: $(ls -A "$TMPDIR")"
    rm -rf "${TMPDIR:?}"/*
  fi
}

readers_gone() {
  local out=$work/run
  rm -rf "$out"
  below 12
  training "$out"
  command=("${args[@]}" "| head -n $r")
  "$program" "${args[@]}" 2>"$work/err" </dev/null | head -n "$r" >"$work/out"
  code=${PIPESTATUS[0]}
  add "readers that went away"
  ended 0 2
  complete "$out"
}

# Signals while requests are scored; what is written beside is whole or not there.
requests_interrupted() {
  local out=$work/run signal
  rm -rf "$out"
  start eval "$work/whole" --requests "$work/requests" --out "$out" --threads 1
  pause 400
  pick INT TERM HUP KILL
  signal=$picked
  hit "$signal"
  finish
  ended 0 $((128 + $(kill -l "$signal")))
  if [ "$code" = 137 ]; then add "kill -9"; elif [ "$code" != 0 ]; then add "signals ($signal)"; fi
  if [ -e "$out/samples.jsonl" ] && [ -n "$(tail -c 1 "$out/samples.jsonl")" ]; then fault torn "samples.jsonl ends inside a line"; fi
}

# Processes that find a sweep finished make the same table and pictures at the same moment.
sweeps_together() {
  local out=$work/run i of=() picture
  rm -rf "$out"
  cp -r "$work/swept" "$out"
  for i in 1 2 3; do
    "$program" "${sweep[@]}" --out "$out" >"$work/out-$i" 2>"$work/err-$i" </dev/null &
    of+=($!)
  done
  command=("${sweep[@]}" --out "$out" "(three at once)")
  for i in 1 2 3; do
    pid=${of[i - 1]}
    finish
    cp "$work/out-$i" "$work/out"
    cp "$work/err-$i" "$work/err"
    ended 0
    if grep -q 'was not drawn' "$work/out"; then fault torn "a picture was not drawn"; fi
  done
  add "sweeps that ended together"
  for picture in "$out"/*.png; do
    if [ -e "$picture" ] && ! tail -c 12 "$picture" | grep -q IEND; then fault torn "the picture $picture"; fi
  done
  cmp -s "$out/table.md" "$work/swept/table.md" || fault torn "the table of a sweep"
  [ "$(ls -A "$out")" = "$(ls -A "$work/swept")" ] || fault litter "files beside the table: $(ls -A "$out")"
}

# Cells whose files are cut, flipped, of another kind or gone: they alone are missing, or done anew to the same numbers.
damaged_cells() {
  local out=$work/run name
  rm -rf "$out"
  cp -r "$work/swept" "$out"
  if ((RANDOM % 2)); then rm "$out"/cells/mamba2-*/result.json; fi
  mapfile -t of < <(cd "$out/cells" && find . -path './mamba2-*' -type f | sort)
  pick "${of[@]}"
  name=$picked
  if ((RANDOM % 2)); then
    damage "$out/cells/$name"
  else
    pick '[]' 5 null '{}' '{"settings":[]}' '{"scores":[]}' '{"curve":5}' '{"seconds":"x"}'
    printf %s "$picked" >"$out/cells/$name"
  fi
  run "${sweep[@]}" --out "$out"
  add "damaged cells"
  ended 0 2 || return
  # The other cell is in the table, whatever became of this one.
  grep -q '| kda |' "$out/table.md" || fault lost "a cell beside a damaged one ($name)"
  if [ "$code" = 0 ]; then
    grep -q '| mamba2 |' "$out/table.md" || fault lost "a cell whose damage nobody spoke of ($name)"
  elif ! grep -q damaged "$work/out" && ! grep -qE 'other settings|damaged' "$work/err"; then
    fault "wrong exit codes" "the error does not say what is damaged ($name)"
  fi
}

# Two imports into one folder: it is that of one of them, whole.
imports_racing() {
  local target=$work/imported first code_first
  rm -rf "$target"
  start import "$work/peer-a" "$target"
  first=$pid
  pause 20
  run import "$work/peer-b" "$target"
  ended 0 2
  code_first=$code
  pid=$first
  finish
  ended 0 2
  add "imports into one folder"
  if [ "$code" != 0 ] && [ "$code_first" != 0 ]; then fault lost "two imports refused each other"; fi
  if ! diff -rq "$target" "$work/imported-a" >/dev/null && ! diff -rq "$target" "$work/imported-b" >/dev/null; then fault torn "an import"; fi
}

# What a command reads is not replaced, under whatever name it is given.
onto_inputs() {
  local input=$work/input-text file=$work/input-text link
  rm -rf "$work/run" "$input"* "$work/reads"
  cp "$work/text" "$input"
  cp -r "$work/half" "$work/reads"
  link=$work/reads/link
  pick tokenize requests state checkpoint task profile report curves
  case $picked in
    tokenize) args=(tokenize "$input" --out) ;;
    requests) args=(requests niah_single_1 --model "$work/reads" --lengths 128 --examples 1 --out); file=$work/reads/model/model.safetensors ;;
    state) args=(generate "$work/reads" --tokens 1 --state-save); file=$work/reads/model/model.safetensors ;;
    checkpoint) args=(generate "$work/reads" --tokens 1 --state-save); file=$(find "$work/reads/checkpoints" -name model.safetensors | head -n 1) ;;
    task) args=(task niah_single_2 --haystack "$input" --draw 1 --out) ;;
    profile) args=(train --profile --text "$input" --hidden-size 16 --num-hidden-layers 1 --num-heads 1 --head-dim 16 --batch 1 --length 8 --threads 1 --json) ;;
    report) rm -rf "$work/reads"; cp -r "$work/swept" "$work/reads"; args=(report "$work/reads" --out); file=$work/reads/table.md ;;
    curves) args=(curves "$work/reads" --out); file=$work/reads/loss.svg ;;
  esac
  cp "$file" "$work/before"
  if ((RANDOM % 2)) && [[ $picked != report && $picked != curves ]]; then
    ln -s "$file" "$link"
    run "${args[@]}" "$link"
  else
    case $picked in
      report) run "${args[@]}" "${file%.md}" ;;
      curves) ln -s "$file" "$link.svg"; run "${args[@]}" "$link" ;;
      *) run "${args[@]}" "$file" ;;
    esac
  fi
  add "outputs onto inputs"
  ended 2
  cmp -s "$file" "$work/before" || fault lost "what a command reads ($picked)"
}

# A name is no command, of gnuplot's or anybody's.
line_breaks() {
  local here=$work/names name=$'x\n!touch pwned\nsystem "touch pwned" #`touch pwned`$(touch pwned)'
  rm -rf "$here"
  mkdir "$here"
  cp -r "$work/swept" "$here/swept"
  cp -r "$work/half" "$here/$name"
  case $((RANDOM % 4)) in
    0) args=(curves "$name" --out "$name-c" --label "$name" --title "$name") ;;
    1) args=(report swept "$name" --out "$name-r" --title "$name") ;;
    2) args=(train --resume --out "$name") ;;
    3) args=(analyze "$name" --text "$work/held-out" --tokens 32 --out "$name-a") ;;
  esac
  command=(cd "$here" "${args[@]}")
  (cd "$here" && exec "$program" "${args[@]}") >"$work/out" 2>"$work/err" </dev/null &
  pid=$!
  finish
  add "line breaks in names"
  ended 0
  if [ -n "$(find "$here" -name pwned)" ]; then fault crashes "a name was run as a command"; fi
}

echo 0 >"$work/current"
watch & watch=$!
for ((i = 0; i < 150; ++i)); do echo "line $i of a text: the state decays, a key reads what was written $((i * i))"; done >"$work/text"
head -n 40 "$work/text" >"$work/held-out"
for ((i = 0; i < 60; ++i)); do cat "$work/text"; done >"$work/long-text"
begin=${EPOCHREALTIME/./}
training "$work/whole"
run "${args[@]}"
[ "$code" = 0 ] || { cat "$work/err" >&4; echo "torture.sh: the program does not even run undisturbed" >&4; exit 2; }
span=$(((${EPOCHREALTIME/./} - begin) / 1000))
begin=${EPOCHREALTIME/./}
run tokenize "$work/long-text" --out "$work/whole-tokens"
tokenize_span=$(((${EPOCHREALTIME/./} - begin) / 1000 + 1))
cp -r "$work/whole" "$work/half"
rm -rf "$work/half/checkpoints/step-16"  # so that a resumed run has something to do
run generate "$work/whole" --tokens 20 --state-save "$work/half/state"
run "${sweep[@]}" --out "$work/swept"
run "${sweep[@]}" --out "$work/swept"  # once more, so that its table is that of a finished sweep
for ((i = 0; i < 200; ++i)); do
  echo "{\"task\":\"t\",\"id\":\"$i\",\"type\":\"gen\",\"prompt\":\"line $i\",\"answers\":[\"a\"],\"max_gen\":50,\"metric\":\"contains\"}"
done >"$work/requests"
for i in a b; do
  if [ $i = a ]; then width=16; else width=32; fi
  run train --text "$work/text" --out "$work/trained-$i" --rule gated_deltanet --layout fla --steps 1 --batch 1 --length 16 --warmup 0 --hidden-size $width \
    --num-hidden-layers 1 --num-heads 1 --head-dim 16 --threads 1
  run export "$work/trained-$i" "$work/peer-$i"
  run import "$work/peer-$i" "$work/imported-$i"
  [ "$code" = 0 ] || { cat "$work/err" >&4; echo "torture.sh: a model could not be exported and imported" >&4; exit 2; }
done
echo "torture: $minutes minutes, seed $seed, an undisturbed run takes $span ms, in $work"

end=$((SECONDS + 60 * minutes))
while ((SECONDS < end)); do
  add rounds
  pick interrupts interrupts interrupts interrupts interrupts interrupts interrupts damaged damaged damaged damaged full_disk two_processes state_files token_files evaluations readers_gone \
    requests_interrupted sweeps_together damaged_cells damaged_cells imports_racing onto_inputs line_breaks
  "$picked"
done

echo
for what in "${!count[@]}"; do echo "${count[$what]} $what"; done | sort -k2
faults=0
for what in crashes hangs lost torn litter "wrong exit codes"; do
  faults=$((faults + ${count[$what]:-0}))
  [ -n "${count[$what]:-}" ] || echo "0 $what"
done
hits=$((${count["kill -9"]:-0}))
for what in INT TERM HUP ALRM; do hits=$((hits + ${count["signals ($what)"]:-0})); done
echo "kills and interrupts: $hits; faults: $faults (commit $(git -C "$(dirname "$program")" rev-parse --short HEAD || echo unknown), seed $seed)"
if ((faults > 0)); then
  echo "what went wrong is in $work/faults"
  exit 1
fi
rm -rf "$work"
