// What M of the preconditioner is made with on the device (rule/precond.h).
#pragma once

#include <numbers>

#include "gpu/ptx.cuh"
#include "rule/precond.h"

namespace fw::cuda {

// 2^x, log and 1/x to about two units in the last place: what else the kernels do takes no time next to the
// exact ones.
struct FastMath {
  static constexpr bool kHasTanh = false;
  FW_DEVICE static float log(float x) { return log2_fast(x) * 0.6931471805599453f; }
  FW_DEVICE static float power(float x) { return exp2_fast(x); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
  FW_DEVICE static float quotient(float a, float b) { return a * rcp_fast(b); }
  FW_DEVICE static float mul_add(float a, float b, float c) { return a * b + c; }
  FW_DEVICE static float one_plus_abs(float x) { return 1 + std::abs(x); }
};

// For powers of two. Host code too.
inline PrecondMap<float> precond_map_of(const Rule& rule) {
  return precond_map(rule, std::log2(static_cast<float>(rule.precond_x)), 0.0f);
}

// M and its slopes with respect to A and to minus the center.
struct PrecondPoint {
  float m = 0, of_state = 0, of_raw = 0;
};
FW_DEVICE PrecondPoint precond_point(const PrecondMap<float>& map, float a) {
  PrecondPoint p;
  if (!map.squashed) {
    p.m = FastMath::inverse(a + map.ridge);
    p.of_state = -p.m * p.m;
    return p;
  }
  const float shifted = a + map.eps, y = PrecondElements<FastMath>::argument(map, shifted), wide = 1 + std::abs(y),
              inverse = FastMath::inverse(shifted * wide), narrow = inverse * shifted;
  p.m = PrecondElements<FastMath>::squashed(map, y * narrow);
  p.of_raw = p.m * (map.slope * std::numbers::ln2_v<float>)*(narrow * narrow);
  p.of_state = p.of_raw * (inverse * wide);
  return p;
}

// dm times the slope of M with respect to A; dcenter is reduced by what reaches the center.
FW_DEVICE float precond_gradient(const PrecondMap<float>& map, float a, float dm, float& dcenter) {
  const PrecondPoint p = precond_point(map, a);
  dcenter -= dm * p.of_raw;
  return dm * p.of_state;
}

// What follows is for squashing forms, from A + eps, and takes fewer operations an element than
// PrecondElements::value() and precond_point() do. M of two by one inverse: special functions are what many of them
// wait for.
FW_DEVICE float2 squashed_m(const PrecondMap<float>& map, const float2& shifted) {
  const float2 y = make_float2(PrecondElements<FastMath>::argument(map, shifted.x),
                               PrecondElements<FastMath>::argument(map, shifted.y));
  const float2 wide = make_float2(1 + std::abs(y.x), 1 + std::abs(y.y));
  const float inverse = rcp_fast(wide.x * wide.y);
  return make_float2(PrecondElements<FastMath>::squashed(map, y.x * (inverse * wide.y)),
                     PrecondElements<FastMath>::squashed(map, y.y * (inverse * wide.x)));
}

// M, and its slope with respect to A over M and slope_factor(), with which sums of many are multiplied.
struct SquashedPoint {
  float m, slope;
};
FW_DEVICE SquashedPoint squashed_point(const PrecondMap<float>& map, float shifted) {
  const float y = PrecondElements<FastMath>::argument(map, shifted), inverse = rcp_fast(shifted * (1 + std::abs(y))),
              narrow = inverse * shifted;
  return {PrecondElements<FastMath>::squashed(map, y * narrow), narrow * inverse};
}
FW_DEVICE float slope_factor(const PrecondMap<float>& map) { return map.slope * 0.6931471805599453f; }

}  // namespace fw::cuda
