// The kernels that a call with these arguments runs, for tests and benches of one phase.
#pragma once

#include "gpu/device.h"
#include "scan/cuda/pipeline.h"

namespace fw::cuda {

inline PrepareChoice selected(const PrepareArgs& args, int k_tile, int64_t chunks, bool cut = false) {
  CallTraits t = problem_traits(args.problem, k_tile, chunks, static_cast<int>(persistent_ctas()));
  t.z = args.z != nullptr;
  t.lo_parts = args.forward_lo.lo_parts != nullptr;
  t.cut = cut;
  return select_prepare(t);
}
inline GradientKernel selected(const GradientArgs& args, int k_tile, int64_t chunks) {
  CallTraits t = problem_traits(args.problem, k_tile, chunks, static_cast<int>(persistent_ctas()));
  add_gradients(args, t);
  return select_gradients(t);
}
inline TokenChoice selected(const TokenForwardArgs& args) {
  CallTraits t = problem_traits(args.problem, 0, 0, sm_count());
  add_states(args, t);
  return select_token(t);
}
// By what the arguments have.
inline ForwardScan selected(const ScanForwardArgs& args, bool sums = false) {
  if (!args.is_delta) return ForwardScan::kAdditive;
  if (args.hi_lo.chunk_tiles != nullptr) return ForwardScan::kHiLo;
  if (args.solved != nullptr) return ForwardScan::kSplitTiles;
  if (args.pairs != nullptr) return sums ? ForwardScan::kSums : ForwardScan::kPairs;
  return args.rows.k.data != nullptr ? ForwardScan::kRows : ForwardScan::kTiles;
}
inline ReverseScan selected(const ScanReverseArgs& args) {
  return args.keys != nullptr ? ReverseScan::kKeys : args.numbers != nullptr ? ReverseScan::kRows : ReverseScan::kTiles;
}

}  // namespace fw::cuda
