// What M of the preconditioner is made with on the device (rule/precond.h).
#pragma once

#include "rule/precond.h"
#include "scan/cuda/device/ptx.cuh"

namespace fw::cuda {

// 2^x, log and 1/x to about two units in the last place: the rest of what the kernels do takes no time next to the exact ones.
struct FastMath {
  FW_DEVICE static float log(float x) { return log2_fast(x) * 0.6931471805599453f; }
  FW_DEVICE static float exp2(float x) { return exp2_fast(x); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
};

}  // namespace fw::cuda
