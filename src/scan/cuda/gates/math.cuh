// What values of gates are made with on the device (rule/gate_law.h): to about two units in the last place.
#pragma once

#include "rule/gate_law.h"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {

struct GateMath {
  FW_DEVICE static float exp(float x) { return exp2_fast(x * 1.442695041f); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
  // For 0 <= x <= 1: 2 artanh(z) of z = x / (2 + x) <= 1/3, whose series leaves out 2e-8 of it. lg2 is exact to an absolute 2^-22 alone, and small
  // softplus are most decays.
  FW_DEVICE static float log1p(float x) {
    const float z = x * rcp_fast(2.0f + x), z2 = z * z;
    float sum = fmaf(z2, 1.0f / 13, 1.0f / 11);
    sum = fmaf(sum, z2, 1.0f / 9), sum = fmaf(sum, z2, 1.0f / 7), sum = fmaf(sum, z2, 0.2f), sum = fmaf(sum, z2, 1.0f / 3);
    return 2.0f * fmaf(z * z2, sum, z);
  }
};

// The same where what is made is rounded to bf16: log(1 + x) to 9e-6 of itself, the best polynomial of its degree on [0, 1].
struct RoundedGateMath : GateMath {
  FW_DEVICE static float log1p(float x) {
    float p = fmaf(-0.0238691494f, x, 0.101222292f);
    p = fmaf(p, x, -0.21004872f), p = fmaf(p, x, 0.325206697f), p = fmaf(p, x, -0.499361366f), p = fmaf(p, x, 0.999991596f);
    return p * x;
  }
};

}  // namespace fw::cuda
