#!/bin/sh
# After the tests: where another program's values lie beside the checkout (tests/support/shared.h says where they are looked for), none
# of them may have been passed over. Reads ctest's log of the run.
#   tools/check_shared.sh BUILD_FOLDER
set -eu
log=${1:?the build folder}/Testing/Temporary/LastTest.log
here=$(cd "$(dirname "$0")/.." && pwd)

vectors=""
for folder in "${FASTWEIGHT_SHARED:-}" "$here/../shared" /work/shared; do
  if [ -z "$vectors" ] && [ -n "$folder" ] && [ -d "$folder/vectors" ]; then vectors=$folder/vectors; fi
done
if [ -z "$vectors" ]; then
  echo "shared: no vectors beside this checkout; its own (tests/conformance) were compared"
  exit 0
fi

bad=0
passed() {
  grep -qF "[       OK ] $1" "$log" || { echo "shared: $vectors is here, but the log has no passed $1" >&2; bad=1; }
}
if grep -qF "the folder shared/ is not here" "$log"; then
  echo "shared: $vectors is here, but tests were skipped as if it were not:" >&2
  grep -F "[  SKIPPED ]" "$log" | sort -u | head -20 >&2
  bad=1
fi
passed "OpsConformanceReference.EveryRule"
for type in 0 1 2; do passed "Types/OpsConformance.EveryRuleInBothForms/$type"; done
passed "Verify.AllThatIsKnownPasses"
count=0
for model in "$vectors"/models/*/; do
  passed "Hf/ModelConformance.AgreeInDouble/$(basename "$model")"
  count=$((count + 1))
done
[ $count -gt 0 ] || { echo "shared: expected models in $vectors/models, found none" >&2; bad=1; }
[ $bad = 0 ] && echo "shared: the recurrences and $count models of $vectors were compared"
exit $bad
