// gradients() of kernels.h: its kernels, each in the file of its phase.
#include "base/error.h"
#include "scan/cuda/sm90/gradients/common/launchers.h"

namespace fw::cuda {

void gradients(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  switch (kernel) {
    case GradientKernel::kChannel:
    case GradientKernel::kChannelAny:
    case GradientKernel::kChannelGated:
    case GradientKernel::kChannelMakesM:
    case GradientKernel::kChannelOwnKey:
    case GradientKernel::kChannelReadsM:
      return gradients_channel(args, kernel, k_tile, chunks, stream);
    case GradientKernel::kAnyGain:
    case GradientKernel::kAnyRows:
    case GradientKernel::kAnyUnscaled:
    case GradientKernel::kGate:
    case GradientKernel::kGateMakesM:
    case GradientKernel::kGateReadsM:
    case GradientKernel::kMakesM:
    case GradientKernel::kReadsM:
    case GradientKernel::kResidual:
    case GradientKernel::kUnscaled:
    case GradientKernel::kUnscaledDecays:
      return gradients_scalar(args, kernel, k_tile, chunks, stream);
    case GradientKernel::kRaw:
    case GradientKernel::kK256:
    case GradientKernel::kK256Gains:
    case GradientKernel::kK256Keys:
    case GradientKernel::kK256Sums:
      fail_internal(
          "gradients: expected a kernel of K up to 128; additive_gradients() and k256_gradients() have the others");
  }
}

}  // namespace fw::cuda
