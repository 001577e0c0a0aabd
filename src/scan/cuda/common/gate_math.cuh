// What values of gates are made with on the device (rule/gate_law.h): to about two units in the last place.
#pragma once

#include <type_traits>

#include "gpu/ptx.cuh"
#include "scan/cuda/args.h"

namespace fw::cuda {

struct GateMath {
  FW_DEVICE static float exp(float x) { return exp2_fast(x * 1.442695041f); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
  // For 0 <= x <= 1: 2 artanh(z) of z = x / (2 + x) <= 1/3, whose series leaves out 2e-8 of it. lg2 is exact to an
  // absolute 2^-22 alone, and small softplus are most decays.
  FW_DEVICE static float log1p(float x) {
    const float z = x * rcp_fast(2.0f + x), z2 = z * z;
    float sum = fmaf(z2, 1.0f / 13, 1.0f / 11);
    sum = fmaf(sum, z2, 1.0f / 9), sum = fmaf(sum, z2, 1.0f / 7), sum = fmaf(sum, z2, 0.2f),
    sum = fmaf(sum, z2, 1.0f / 3);
    return 2.0f * fmaf(z * z2, sum, z);
  }
};

// The same where what is made is rounded to bf16: log(1 + x) to 9e-6 of itself, the best polynomial of its degree on
// [0, 1].
struct RoundedGateMath : GateMath {
  FW_DEVICE static float log1p(float x) {
    float p = fmaf(-0.0238691494f, x, 0.101222292f);
    p = fmaf(p, x, -0.21004872f), p = fmaf(p, x, 0.325206697f), p = fmaf(p, x, -0.499361366f),
    p = fmaf(p, x, 0.999991596f);
    return p * x;
  }
};

// Of channels of a head: dt_bias and exp(a_log).
template <int kN>
struct GateScalars {
  float bias[kN], rate[kN];
};
template <int kN>
FW_DEVICE GateScalars<kN> gate_scalars(const HeadArg& a_log, const HeadArg& dt_bias, int head, int channel) {
  GateScalars<kN> x;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    x.bias[j] =
        dt_bias.data != nullptr ? dt_bias.data[head * dt_bias.stride_h + (channel + j) * dt_bias.stride_k] : 0.0f;
    x.rate[j] = a_log.data != nullptr
                    ? GateMath::exp(a_log.data[head * a_log.stride_h + (channel + j) * a_log.stride_k])
                    : 1.0f;
  }
  return x;
}

// ---- Values that prepare() and gradients() make themselves (FusedGates), rounded to bf16 as the kernels of gates/
// leave them. Here they stand in the way of a chunk's other work: no branch stands between one number and the next,
// whose exponentials wait for each other then, and units are of log 2.

// A log-decay's law (gate_law.h) with the numbers of a channel. The value is size F(t / log2 e) of t = slope x +
// at_0. F is softplus or, of a lower bound, the sigmoid (kSigmoid).
struct DecayLaw {
  float slope, at_0, size;
  FW_DEVICE DecayLaw(const GateLaw<float>& law, float bias, float rate) {
    slope = kLog2E * (law.given == GateActivation::kLowerBound   ? rate
                      : law.given == GateActivation::kLogSigmoid ? -1.0f
                                                                 : 1.0f),
    at_0 = slope * bias;
    size = law.given == GateActivation::kLowerBound   ? law.factor
           : law.given == GateActivation::kLogSigmoid ? -law.factor
                                                      : -rate;
  }
};
inline constexpr float kLn2 = 0.693147181f;
// The sigmoid of t / log2 e: 0 where the exponential is infinite.
FW_DEVICE float sigmoid_of_log2(float t) { return rcp_fast(1.0f + exp2_fast(-t)); }
FW_DEVICE float softplus_of_log2(float t) {
  return fmaf(kLn2, max(t, 0.0f), RoundedGateMath::log1p(exp2_fast(-std::abs(t))));
}
template <bool kSigmoid>
FW_DEVICE float decay_value(const DecayLaw& law, float x) {
  const float t = fmaf(law.slope, x, law.at_0);
  return law.size * (kSigmoid ? sigmoid_of_log2(t) : softplus_of_log2(t));
}
// What it changes by with x and with a_log.
template <bool kSigmoid>
FW_DEVICE float2 decay_slopes(const DecayLaw& law, float x) {
  const float t = fmaf(law.slope, x, law.at_0), size = law.size * (law.slope * kLn2);
  if constexpr (kSigmoid) {
    const float s = sigmoid_of_log2(t), slope = fmaf(-s, s, s);
    return make_float2(size * slope, law.size * slope * (t * kLn2));
  }
  const float e = exp2_fast(-std::abs(t)), inverse = rcp_fast(1.0f + e);  // of both: special functions are few
  return make_float2(size * (t < 0.0f ? e * inverse : inverse),
                     law.size * fmaf(kLn2, max(t, 0.0f), RoundedGateMath::log1p(e)));
}
// body(whether the law is of sigmoids, as a constant).
template <class Body>
FW_DEVICE void with_decay_law(const GateLaw<float>& law, Body&& body) {
  law.given == GateActivation::kLowerBound ? body(std::true_type()) : body(std::false_type());
}
// Two neighbours' log-decays.
template <bool kSigmoid>
FW_DEVICE uint32_t fused_decays(const DecayLaw& low, const DecayLaw& high, uint32_t logits) {
  return pack_bf16(decay_value<kSigmoid>(low, bf16_low(logits)), decay_value<kSigmoid>(high, bf16_high(logits)));
}

// Two neighbouring gates, factor times sigmoids, and what they change by with their logits.
struct FusedPair {
  uint32_t values;
  float2 slopes;
};
FW_DEVICE FusedPair fused_pair(float factor, uint32_t logits) {
  const float x = sigmoid_of_log2(kLog2E * bf16_low(logits)), y = sigmoid_of_log2(kLog2E * bf16_high(logits));
  return {pack_bf16(factor * x, factor * y), make_float2(factor * fmaf(-x, x, x), factor * fmaf(-y, y, y))};
}
FW_DEVICE uint4 fused_gates(float factor, const uint4& logits) {
  return make_uint4(fused_pair(factor, logits.x).values, fused_pair(factor, logits.y).values,
                    fused_pair(factor, logits.z).values, fused_pair(factor, logits.w).values);
}

}  // namespace fw::cuda
