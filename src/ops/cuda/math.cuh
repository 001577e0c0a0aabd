// Functions of one number, to float32's last places where nothing else is said.
#pragma once

#include "gpu/ptx.cuh"

namespace fw::cuda {

FW_DEVICE float exp_fast(float x) { return exp2_fast(kLog2E * x); }

FW_DEVICE float sigmoid(float x) { return rcp_fast(1.0f + exp2_fast(-kLog2E * x)); }

// d silu(x) / dx, given s = sigmoid(x).
FW_DEVICE float silu_slope(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

// log((1 + u) / (1 - u)) for |u| <= 1/3: the series of 2 atanh(u), which keeps its digits where the logarithm of a
// number near 1 has lost them.
FW_DEVICE float log_ratio(float u) {
  const float square = u * u;
  float sum = 2.0f / 13.0f;
  sum = sum * square + 2.0f / 11.0f;
  sum = sum * square + 2.0f / 9.0f;
  sum = sum * square + 2.0f / 7.0f;
  sum = sum * square + 2.0f / 5.0f;
  sum = sum * square + 2.0f / 3.0f;
  sum = sum * square + 2.0f;
  return u * sum;
}

// log(1 + exp(x)), without an exponent above zero.
FW_DEVICE float softplus(float x) {
  const float e = exp2_fast(-kLog2E * fabsf(x));
  return fmaxf(x, 0.0f) + log_ratio(e * rcp_fast(2.0f + e));
}

// log(1 - s), s <= 1.
FW_DEVICE float log_of_complement(float s) {
  constexpr float kLn2 = 0.6931471805599453f;
  return s > 0.5f ? kLn2 * log2_fast(1.0f - s) : -log_ratio(s * rcp_fast(2.0f - s));
}

}  // namespace fw::cuda
