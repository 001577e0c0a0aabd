// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"
#include "scan/cuda/sm90/gradients/common/launchers.h"

namespace fw::cuda {
namespace {

template <int kTileK, bool kDelta>
void launch_choice(const GradientArgs& args, const GradientChoice& choice, int64_t chunks, void* stream) {
  if (choice.m == RowM::kMade)
    return launch_channel_gradients<ChannelShape<kTileK, kDelta, true, false, RowM::kMade>>(args, chunks, stream);
  if (choice.m == RowM::kRead)
    return launch_channel_gradients<ChannelShape<kTileK, kDelta, true, false, RowM::kRead>>(args, chunks, stream);
  if constexpr (kDelta) {
    if (choice.gates) return launch_channel_gradients<ChannelShape<kTileK, true, true, true>>(args, chunks, stream);
    if (choice.own_key)
      return launch_channel_gradients<ChannelShape<kTileK, true, true, false, RowM::kNone, true>>(args, chunks, stream);
  }
  choice.streams ? launch_channel_gradients<ChannelShape<kTileK, kDelta, true>>(args, chunks, stream)
                 : launch_channel_gradients<ChannelShape<kTileK, kDelta, false>>(args, chunks, stream);
}

}  // namespace

void gradients_channel(const GradientArgs& args, const GradientChoice& choice, int key, int64_t chunks, void* stream) {
  if (choice.fused) return gradients_fused(args, choice, key, chunks, stream);
  if (args.problem.rule.is_delta()) {
    key == 128 ? launch_choice<128, true>(args, choice, chunks, stream)
               : launch_choice<64, true>(args, choice, chunks, stream);
  } else {
    key == 128 ? launch_choice<128, false>(args, choice, chunks, stream)
               : launch_choice<64, false>(args, choice, chunks, stream);
  }
}

}  // namespace fw::cuda
