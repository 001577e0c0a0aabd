// Where a gain may exceed 1, errors do not fade, and what keys that point the same way lose in bf16 adds up. There the
// products take keys that lose nothing. With e = a e', z = a z' and w = b w', of numbers a and b a row,
//   A' = diag(b) A diag(a)      W' = W / a      R' = b R = A' W'      dR' = dR / b      dZ' = a dZ = A'^T dR'
// and P' of w': X, M, Y, Q - P Y and all gradients are made of the primed ones as of the others (recurrence.md 4 and 5;
// states, outputs and dO stay as they are). a and b are chosen so that e' is the raw key times a power of two and w'
// the raw key; A is multiplied in float32 and rounded once.
#pragma once

#include "scan/cuda/common/front/plain.cuh"

namespace fw::cuda {

// x = 2^n m, 1 <= m < 2, to the bit whoever asks: 2^n with the sign of x. 0 (and what is next to it): 0, m is 1 then.
FW_DEVICE float power_of(float x) { return bits_float(float_bits(x) & 0xff800000u); }
FW_DEVICE float mantissa_of(float x) {
  return power_of(x) == 0.0f ? 1.0f : bits_float((float_bits(x) & 0x007fffffu) | 0x3f800000u);
}

// The coefficients (rule/front.h) of e', z' and w', and a and b, from those of e, z and w.
struct UnscaledCoefs {
  FrontCoefs<float> primed;
  float a, b;
};
FW_DEVICE UnscaledCoefs unscaled_coefs(const FrontCoefs<float>& c) {
  const float gain = c.z_v;  // the gate
  UnscaledCoefs y;
  y.b = c.w_k != 0.0f ? c.w_k : 1.0f;
  y.a = mantissa_of(gain) * y.b;
  y.primed = c;
  y.primed.e_k = power_of(gain), y.primed.w_k = 1, y.primed.z_v = power_of(gain) * rcp_fast(y.b);
  return y;
}
// From gradients of the primed coefficients to those of the others.
FW_DEVICE void of_unscaled_coefs(FrontCoefs<float>& d, float a, float b) {
  const float inverse = rcp_fast(a);
  d.e_k *= inverse, d.z_v *= inverse, d.w_k *= rcp_fast(b);
}

// The gradient of a gain that both e and z have is (z.dz + e.de) / gain. With R = Z - E S0 - T R (recurrence.md 4) that
// is R.dZ / gain. This is exact where the two sums cancel (gain_by_residual() of the rule, rule_traits.h). z_v: of the
// row; else that is too near to 0.
FW_DEVICE bool gain_by_residual(float z_v) { return fabsf(z_v) > 0x1p-40f; }
// The gradient of z_v for which that comes out, whatever the gain is made of: of z.dz = R.dZ - e.de.
FW_DEVICE float value_coefficient_gradient(float r_dz, float e_de, float z_v) { return (r_dz - e_de) * rcp_fast(z_v); }
// e.de of a row; e is k or an own erase key there.
FW_DEVICE float erase_sum(const FrontCoefs<float>& c, const FrontCoefs<float>& d) {
  return c.e_k * d.e_k + c.e_p * d.e_p;
}
// gain_is_gate(): the gain's own. r_dz: R.dZ; of unscaled keys R'.dZ', with a and b.
FW_DEVICE float gain_gradient(float r_dz, float gain) { return r_dz * rcp_fast(gain); }
FW_DEVICE float unscaled_gain_gradient(float r_dz, float a, float b, float gain) {
  return gain_gradient(r_dz * rcp_fast(a * b), gain);
}

}  // namespace fw::cuda
