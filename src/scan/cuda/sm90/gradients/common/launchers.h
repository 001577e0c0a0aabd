// The launchers that gradients() chooses from.
#pragma once

#include "scan/cuda/kernels.h"
#include "scan/cuda/rule_traits.h"

namespace fw::cuda {

// Scalar or constant decay, or none: kernels of gradients/scalar and gradients/general.
void gradients_scalar(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);
// One decay for each channel: gradients/channel.
void gradients_channel(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);
// Of those, with logits (Problem::fused).
void gradients_fused(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);

}  // namespace fw::cuda
