// bfloat16: the upper half of a float. Rounding to nearest even; NaN stays NaN (its quiet bit is set).
#pragma once

#include <cstdint>

namespace fw {

// A type of its own: no arithmetic, no conversion from integers, so that it can be the activations of a model.
struct Bf16 {
  uint16_t bits;
};
static_assert(sizeof(Bf16) == 2);

void round_to_bf16(int64_t n, const float* x, Bf16* out);
// The same kept as floats: what is left of x after rounding. out may be x.
void round_to_bf16_values(int64_t n, const float* x, float* out);
void widen_bf16(int64_t n, const Bf16* x, float* out);

}  // namespace fw
