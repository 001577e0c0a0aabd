// The channel gradients that make log-decays and gates of their logits, and gradients of these (FusedGates): delta
// rules without a preconditioner.
#include "scan/cuda/sm90/gradients/channel/fused_gates.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kTileK, bool kGates>
void launch_fused(const GradientArgs& args, int64_t chunks, void* stream) {
  if (args.head_sums != nullptr) {
    launch_channel_gradients<ChannelShape<kTileK, true, true, kGates, RowM::kNone, false, true, false, true>>(
        args, chunks, stream);
  } else {
    launch_channel_gradients<ChannelShape<kTileK, true, true, kGates, RowM::kNone, false, true, false, false>>(
        args, chunks, stream);
  }
}

}  // namespace

void gradients_fused(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  if (kernel == GradientKernel::kChannelGated)
    return launch_fused<128, true>(args, chunks, stream);  // gradients_fuse_gates()
  k_tile == 128 ? launch_fused<128, false>(args, chunks, stream) : launch_fused<64, false>(args, chunks, stream);
}

}  // namespace fw::cuda
