// The activation of an output gate and its slope, for the kernels that norm and gate heads.
#pragma once

#include "ops/cuda/math.cuh"
#include "ops/ops.h"

namespace fw::cuda {

struct Gate {
  float act, slope;
};
// Choices between numbers, no branches: kernels call this for each number of a packet.
FW_DEVICE Gate gate_of(GateKind kind, float x) {
  const float s = kind == GateKind::kNone ? 1.0f : sigmoid(x), slope = s * (1.0f - s);
  return kind == GateKind::kSilu ? Gate{x * s, silu_slope(x, s)} : Gate{s, slope};
}

}  // namespace fw::cuda
