// The channel gradients that make log-decays and gates of their logits, and gradients of these (FusedGates): delta
// rules without a preconditioner.
#include "scan/cuda/dispatch.h"
#include "scan/cuda/sm90/gradients/channel/fused_gates.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {

void gradients_fused(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  using Traits = ChannelGradientTraits;
  with_constants(
      [&](auto sums_heads) {
        if (kernel == GradientKernel::kChannelGated) {  // gradients_fuse_gates()
          launch_channel_gradients<
              ChannelShape<Traits{.has_gated_rows = true, .has_fused_gates = true, .sums_heads = sums_heads}>>(
              args, chunks, stream);
        } else if (k_tile == 128) {
          launch_channel_gradients<ChannelShape<Traits{.has_fused_gates = true, .sums_heads = sums_heads}>>(
              args, chunks, stream);
        } else {
          launch_channel_gradients<
              ChannelShape<Traits{.k_tile = 64, .has_fused_gates = true, .sums_heads = sums_heads}>>(args, chunks,
                                                                                                     stream);
        }
      },
      args.head_sums != nullptr);
}

}  // namespace fw::cuda
