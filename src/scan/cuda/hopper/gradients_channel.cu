// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/device/gradient_channel_kernel.cuh"

namespace fw::cuda {
namespace {

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, bool copied, int64_t chunks, void* stream) {
  const Rule& rule = args.problem.rule;
  if (copied && plain_streams(rule)) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true>>(args, chunks, stream);
  } else if (kOnline && copied && gated_streams(rule)) {
    launch_channel_gradients<ChannelShape<kKey, true, true, true>>(args, chunks, stream);
  } else {
    launch_channel_gradients<ChannelShape<kKey, kOnline, false>>(args, chunks, stream);
  }
}

}  // namespace

// copied: the rows of q, k and a channel gate on e are whole 16-byte pieces.
void gradients_channel(const GradientArgs& args, int key, bool copied, int64_t chunks, void* stream) {
  if (args.problem.rule.online()) {
    key == 128 ? launch_rows<128, true>(args, copied, chunks, stream) : launch_rows<64, true>(args, copied, chunks, stream);
  } else {
    key == 128 ? launch_rows<128, false>(args, copied, chunks, stream) : launch_rows<64, false>(args, copied, chunks, stream);
  }
}

}  // namespace fw::cuda
