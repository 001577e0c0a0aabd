#!/bin/sh
# tools/build.sh FOLDER JOBS TARGET...: builds, and says how far it is in one line: on a terminal one that is drawn anew, elsewhere every tenth of the way.
# Warnings and errors are shown as they are.
set -eu
folder=$1
jobs=$2
shift 2
export NINJA_STATUS="[%p, %f of %t, %e s] "
if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then
  exec cmake --build "$folder" -j "$jobs" --target "$@"
fi
status=$(mktemp)
trap 'rm -f "$status"' EXIT
{ cmake --build "$folder" -j "$jobs" --target "$@" 2>&1 || echo $? > "$status"; } | awk '
  /^\[ *[0-9]+%, [0-9]+ of [0-9]+/ {
    share = $0; sub(/^\[ */, "", share); sub(/%.*/, "", share)
    if (int(share / 10) > shown) { shown = int(share / 10); line = $0; sub(/\].*/, "]", line); print "build " line; fflush() }
    next
  }
  { print; fflush() }'
[ ! -s "$status" ] || exit "$(cat "$status")"
