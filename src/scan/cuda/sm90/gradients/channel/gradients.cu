// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/channel/fused_gates.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kTileK, bool kDelta>
void launch_kernel(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream) {
  if (kernel == GradientKernel::kChannelMakesM)
    return launch_channel_gradients<ChannelShape<kTileK, kDelta, true, false, RowM::kMade>>(args, chunks, stream);
  if (kernel == GradientKernel::kChannelReadsM)
    return launch_channel_gradients<ChannelShape<kTileK, kDelta, true, false, RowM::kRead>>(args, chunks, stream);
  if constexpr (kDelta) {
    if (kernel == GradientKernel::kChannelGated)
      return launch_channel_gradients<ChannelShape<kTileK, true, true, true>>(args, chunks, stream);
    if (kernel == GradientKernel::kChannelOwnKey)
      return launch_channel_gradients<ChannelShape<kTileK, true, true, false, RowM::kNone, true>>(args, chunks, stream);
  }
  kernel == GradientKernel::kChannel
      ? launch_channel_gradients<ChannelShape<kTileK, kDelta, true>>(args, chunks, stream)
      : launch_channel_gradients<ChannelShape<kTileK, kDelta, false>>(args, chunks, stream);
}

}  // namespace

void gradients_channel(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  if (args.problem.fused.g.given != GateActivation::kValue)
    return gradients_fused(args, kernel, k_tile, chunks, stream);
  if (args.problem.rule.is_delta()) {
    k_tile == 128 ? launch_kernel<128, true>(args, kernel, chunks, stream)
                  : launch_kernel<64, true>(args, kernel, chunks, stream);
  } else {
    k_tile == 128 ? launch_kernel<128, false>(args, kernel, chunks, stream)
                  : launch_kernel<64, false>(args, kernel, chunks, stream);
  }
}

}  // namespace fw::cuda
