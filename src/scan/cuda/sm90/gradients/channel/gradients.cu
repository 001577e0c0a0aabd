// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/channel/fused_gates.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kTileK, bool kIsDelta>
void launch_kernel(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream) {
  using Traits = ChannelGradientTraits;
  if (kernel == GradientKernel::kChannelMakesM)
    return launch_channel_gradients<ChannelShape<Traits{.k_tile = kTileK, .is_delta = kIsDelta, .m = RowM::kMade}>>(
        args, chunks, stream);
  if (kernel == GradientKernel::kChannelReadsM)
    return launch_channel_gradients<ChannelShape<Traits{.k_tile = kTileK, .is_delta = kIsDelta, .m = RowM::kRead}>>(
        args, chunks, stream);
  if constexpr (kIsDelta) {
    if (kernel == GradientKernel::kChannelGated)
      return launch_channel_gradients<ChannelShape<Traits{.k_tile = kTileK, .has_gated_rows = true}>>(args, chunks,
                                                                                                      stream);
    if (kernel == GradientKernel::kChannelOwnKey)
      return launch_channel_gradients<ChannelShape<Traits{.k_tile = kTileK, .has_own_erase_rows = true}>>(args, chunks,
                                                                                                          stream);
  }
  kernel == GradientKernel::kChannel
      ? launch_channel_gradients<ChannelShape<Traits{.k_tile = kTileK, .is_delta = kIsDelta}>>(args, chunks, stream)
      : launch_channel_gradients<
            ChannelShape<Traits{.k_tile = kTileK, .is_delta = kIsDelta, .has_stream_rows = false}>>(args, chunks,
                                                                                                    stream);
}

}  // namespace

void gradients_channel(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  if (args.problem.fused.g.given != GateActivation::kValue)
    return gradients_fused(args, kernel, k_tile, chunks, stream);
  with_constants(
      [&](auto small, auto is_delta) { launch_kernel<small ? 64 : 128, is_delta>(args, kernel, chunks, stream); },
      k_tile == 64, args.problem.rule.is_delta());
}

}  // namespace fw::cuda
