#!/bin/bash
# Tests of device code on this machine's GPU: every program of the label gpu, selftest, a look at the machine code of products, then
# compute-sanitizer's four tools over the small shapes of each kernel.
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
# Says something of optimised code alone (FW_CUDA_FAST_COMPILE=OFF).
if command -v cuobjdump > /dev/null; then
  run "operands of products in flight" "$(dirname "$0")/check_products.py" "$build/fastweight"
else
  echo "left out: tools/check_products.py (no cuobjdump)"
fi

if [ "${2:-}" != --no-sanitizer ]; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  run "memcheck of token_test" "$sanitizer" --tool memcheck --error-exitcode 9 --leak-check no "$build/tests/token_test"
  for tool in memcheck racecheck synccheck initcheck; do
    tests='Small.*:*Decode.AttentionOf*/CudaBf16:*DeviceList.GatedLinear/CudaBf16:*DeviceList.NormedLinear/CudaBf16'
    # racecheck miscounts barriers there (docs/notes/2026-11-tools-and-compilers.md); the emulation under ThreadSanitizer looks for these races (make tsan).
    [ "$tool" = racecheck ] && tests="$tests:-Small.CheckpointsAndFloat16:Small.Rings"
    run "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 --leak-check no "$build/tests/test_cuda" --gtest_filter="$tests"
  done
fi
exit $failed
