// Whether value heads that share keys go through prepare together (sm90/prepare/grouped.cu), and how many of them in a
// block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "scan/cuda/select.h"

namespace fw::cuda {

inline constexpr int kMostGroupedHeads = 8;
inline constexpr int kGroupedBlocks = 3;  // of an SM

// Of `group` value heads that share keys, HV in all: so many that each SM has its blocks twice, the rest one after the
// other.
inline int grouped_heads(int64_t group, int64_t HV, int64_t chunks, int64_t sm_count) {
  int heads = static_cast<int>(std::min<int64_t>(group, kMostGroupedHeads));
  while (heads > 1 && chunks * HV / heads < 2 * kGroupedBlocks * sm_count) heads = (heads + 1) / 2;
  return heads;
}

// Of a call; 1: it takes the kernel of `choice`. The bits are the same. Of rules whose rows are left to the scans,
// where numbers are values.
inline int grouped_heads(const PrepareArgs& args, const PrepareChoice& choice, int64_t chunks, int64_t sm_count) {
  const Problem& x = args.problem;
  const bool takes = choice.kernel == PrepareKernel::kScalar && choice.multiples && x.rule.is_delta() &&
                     !wants_hi_lo(x.rule) && args.backward == nullptr && args.z == nullptr && !x.fused.any() &&
                     x.group > 1 && x.in.q.divisor > 1 && x.in.k.divisor > 1;
  return takes ? grouped_heads(x.group, x.HV, chunks, sm_count) : 1;
}

}  // namespace fw::cuda
