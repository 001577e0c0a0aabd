// k256_gradients() of rules whose channels decay each by its own: gradients/channel over half of the channels.
#include "scan/cuda/launchers.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/sm90/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <bool kStreams, bool kGates>
void launch_half(const GradientArgs& args, int64_t chunks, void* stream) {
  launch_channel_gradients<ChannelShape<kHalfTileK, true, kStreams, kGates, RowM::kNone, false, false, true>>(
      args, chunks, stream);
}

}  // namespace

void k256_gradients_keys(const GradientArgs& args, int64_t chunks, void* stream) {
  CallTraits half = problem_traits(args.problem, kHalfTileK, chunks, 0);
  add_gradients(args, half);
  const GradientKernel kernel = select_gradients(half);
  if (kernel == GradientKernel::kChannelGated) return launch_half<true, true>(args, chunks, stream);
  kernel == GradientKernel::kChannel ? launch_half<true, false>(args, chunks, stream)
                                     : launch_half<false, false>(args, chunks, stream);
}

}  // namespace fw::cuda
