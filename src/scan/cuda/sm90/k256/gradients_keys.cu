// k256_gradients() of rules whose channels decay each by its own: gradients/channel over half of the channels.
#include "scan/cuda/launchers.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <ChannelGradientTraits kTraits>
void launch_half(const GradientArgs& args, int64_t chunks, void* stream) {
  static_assert(kTraits.k_tile == kHalfTileK && kTraits.has_half_of_keys);
  launch_channel_gradients<ChannelShape<kTraits>>(args, chunks, stream);
}

}  // namespace

void k256_gradients_keys(const GradientArgs& args, int64_t chunks, void* stream) {
  CallTraits half = problem_traits(args.problem, kHalfTileK, chunks, 0);
  add_gradients(args, half);
  const GradientKernel kernel = select_gradients(half);
  using Traits = ChannelGradientTraits;
  if (kernel == GradientKernel::kChannelGated)
    return launch_half<Traits{.has_gated_rows = true, .has_half_of_keys = true}>(args, chunks, stream);
  kernel == GradientKernel::kChannel
      ? launch_half<Traits{.has_half_of_keys = true}>(args, chunks, stream)
      : launch_half<Traits{.has_stream_rows = false, .has_half_of_keys = true}>(args, chunks, stream);
}

}  // namespace fw::cuda
