// Sums over lanes of several numbers at once: each exchange leaves half of them, so that 32 sums over a warp take 31
// exchanges in place of 160.
#pragma once

#include "gpu/ptx.cuh"

namespace fw::cuda {

// Sums over the kLanes lanes whose numbers differ in the bits from kStride on: lane i is left with those of the numbers
// v[j kCount / kLanes] and after, j = i / kStride % kLanes, in v[0], .... kCount, kLanes, kStride: powers of two,
// kLanes <= kCount.
template <int kLanes, int kStride, int kCount>
FW_DEVICE void halve(float (&v)[kCount]) {
  static_assert(kLanes * kStride <= 32 && kLanes <= kCount);
  const int lane = static_cast<int>(lane_index());
  FW_UNROLL for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    const int half = kCount / kLanes * lanes;
    const bool upper = (lane & (lanes * kStride)) != 0;
    FW_UNROLL for (int i = 0; i < half; ++i) {
      const float low = v[i], high = v[i + half];  // read both: a choice of indices would put v into memory
      v[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, lanes * kStride);
    }
  }
}

// Lane i is left with the warp's sum of v[i / (32 / kCount)].
template <int kCount>
FW_DEVICE float sums_by_halving(float (&v)[kCount]) {
  halve<kCount, 32 / kCount>(v);
  float sum = v[0];
  FW_UNROLL for (int mask = 32 / kCount / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

}  // namespace fw::cuda
