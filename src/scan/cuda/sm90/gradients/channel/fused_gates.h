#pragma once

#include "scan/cuda/kernels.h"

namespace fw::cuda {

// gradients_channel() of calls with logits (Problem::fused).
void gradients_fused(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);

}  // namespace fw::cuda
