#!/bin/bash
# The recurrence of every named rule on this machine's GPU, at the two shapes of docs/performance.md; JSON with commit, GPU, driver and date.
# Medians of 100 calls, or of REPEATS.
#   tools/gpu_bench.sh PROGRAM FOLDER [COMMIT]
set -eu
program=$1 folder=$2
commit=${3:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}
mkdir -p "$folder"
name=$folder/$(date +%F)-$commit
"$program" bench --device cuda --sequences 4 --tokens 4096 --heads 16 --repeats "${REPEATS:-100}" --commit "$commit" --json "$name-4x4096x16.json" ${RULES:+--rule "$RULES"}
"$program" bench --device cuda --sequences 1 --tokens 32768 --heads 16 --repeats "${REPEATS:-100}" --commit "$commit" --json "$name-1x32768x16.json" ${RULES:+--rule "$RULES"}
