// What M of the preconditioner is made with on the device (rule/precond.h).
#pragma once

#include "rule/precond.h"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {

// 2^x, log and 1/x to about two units in the last place: the rest of what the kernels do takes no time next to the exact ones.
struct FastMath {
  FW_DEVICE static float log(float x) { return log2_fast(x) * 0.6931471805599453f; }
  FW_DEVICE static float exp2(float x) { return exp2_fast(x); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
};

// What follows is for squashing forms, from A + eps, and takes fewer operations an element than precond_value() and precond_point() do.
// M of two by one inverse: special functions are what many of them wait for.
FW_DEVICE float2 squashed_m(const PrecondMap<float>& map, const float2& shifted) {
  const float2 y = make_float2(squash_argument<FastMath>(map, shifted.x), squash_argument<FastMath>(map, shifted.y));
  const float2 wide = make_float2(1 + std::abs(y.x), 1 + std::abs(y.y));
  const float inverse = rcp_fast(wide.x * wide.y);
  return make_float2(squash_value<FastMath>(map, y.x * (inverse * wide.y)), squash_value<FastMath>(map, y.y * (inverse * wide.x)));
}

// M, and its slope with respect to A over M and slope_factor(), with which sums of many are multiplied.
struct SquashedPoint {
  float m, slope;
};
FW_DEVICE SquashedPoint squashed_point(const PrecondMap<float>& map, float shifted) {
  const float y = squash_argument<FastMath>(map, shifted), inverse = rcp_fast(shifted * (1 + std::abs(y))), narrow = inverse * shifted;
  return {squash_value<FastMath>(map, y * narrow), narrow * inverse};
}
FW_DEVICE float slope_factor(const PrecondMap<float>& map) { return map.slope * 0.6931471805599453f; }

}  // namespace fw::cuda
