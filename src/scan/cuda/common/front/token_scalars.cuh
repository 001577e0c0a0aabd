// Gates and log-decays of one scalar per token and value head that are logits (FusedGates). prepare() makes the values,
// as the kernels of rewrites/gate_kernels.cu would, and leaves them for whoever reads them later. gradients() and
// additive_gradients() make the gradients of the logits from these values alone, whoever has made them. (recurrence.md
// 2.1; rule/gate_law.h.)
#pragma once

#include "scan/cuda/common/front/rows.cuh"
#include "scan/cuda/common/gate_math.cuh"

namespace fw::cuda {

// ---- Values

// Of a gate, whose law is a sigmoid.
FW_DEVICE float fused_scalar(const GateLaw<float>& law, float x) {
  return law.given == GateActivation::kValue ? x : law.factor * sigmoid_of<GateMath>(x);
}

// The law of a head's log-decays, a softplus or a log-sigmoid: value -size softplus(slope (x + bias)).
struct DecayScalar {
  float size = 1, slope = 1, bias = 0;
};
FW_DEVICE DecayScalar decay_scalar(const FusedGates& fused, int head) {
  const GateScalars<1> own = gate_scalars<1>(fused.a_log, fused.dt_bias, head, 0);
  const bool log_sigmoid = fused.g.given == GateActivation::kLogSigmoid;
  return {log_sigmoid ? fused.g.factor : own.rate[0], log_sigmoid ? -1.0f : 1.0f, own.bias[0]};
}
FW_DEVICE float fused_decay(const DecayScalar& law, float x) {
  return -law.size * softplus_of<GateMath>(law.slope * (x + law.bias));
}

// ---- Slopes, of values

FW_DEVICE float scalar_slope(const GateLaw<float>& law, float value) {
  return law.given == GateActivation::kValue ? 1.0f : value * (1.0f - value * rcp_fast(law.factor));
}
// 1 - exp(-x) for x >= 0, without the digits that the difference loses of a small x.
FW_DEVICE float one_less_exp(float x) {
  return x < 0.015625f ? x * (1.0f - x * (0.5f - x * (1.0f / 6))) : 1.0f - GateMath::exp(-x);
}
// By the logit (and the bias); by a_log a softplus' value changes by itself.
FW_DEVICE float decay_slope(const DecayScalar& law, float value) {
  return law.size > 0 ? -law.slope * law.size * one_less_exp(-value * rcp_fast(law.size)) : 0.0f;
}
// By a warp, two rows of a chunk a lane (without one: gradient and value 0): d, the gradients of log-decays, become
// those of logits. parts: what dt_bias and a_log take of them; or null.
FW_DEVICE void decay_logit_gradients(const FusedGates& fused, int head, const float (&values)[2], float (&d)[2],
                                     float* parts) {
  const DecayScalar law = decay_scalar(fused, head);
  float of_bias = 0, of_rate = 0;
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    of_rate += d[i] * values[i];
    d[i] *= decay_slope(law, values[i]);
    of_bias += d[i];
  }
  if (parts == nullptr) return;
  of_bias = warp_sum(of_bias), of_rate = warp_sum(of_rate);
  if (lane_index() == 0) parts[0] = of_bias, parts[1] = of_rate;
}

}  // namespace fw::cuda
