// The activation of an output gate and its slope, for the kernels that norm and gate heads.
#pragma once

#include "ops/cuda/math.cuh"
#include "ops/ops.h"

namespace fw::cuda {

struct Gate {
  float act, slope;
};
FW_DEVICE Gate gate_of(GateKind kind, float x) {
  if (kind == GateKind::kNone) return {1.0f, 0.0f};
  const float s = sigmoid(x);
  return kind == GateKind::kSilu ? Gate{x * s, silu_slope(x, s)} : Gate{s, s * (1.0f - s)};
}

}  // namespace fw::cuda
