// float16 (IEEE binary16). Rounding to nearest even; what is beyond 65504 after it becomes an infinity, what is below
// 2^-14 a subnormal number, NaN stays NaN.
#pragma once

#include <cstdint>

namespace fw {

// A type of its own, as Bf16.
struct F16 {
  uint16_t bits;
};
static_assert(sizeof(F16) == 2);

void round_to_f16(int64_t n, const float* x, F16* out);
void widen_f16(int64_t n, const F16* x, float* out);

}  // namespace fw
