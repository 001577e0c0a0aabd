// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/device/gradient_channel_kernel.cuh"

namespace fw::cuda {

void gradients_channel(const GradientArgs& args, int key, bool fast, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    if (fast) {
      online ? launch_channel_gradients<ChannelShape<128, true, true>>(args, chunks, stream)
             : launch_channel_gradients<ChannelShape<128, false, true>>(args, chunks, stream);
    } else {
      online ? launch_channel_gradients<ChannelShape<128, true, false>>(args, chunks, stream)
             : launch_channel_gradients<ChannelShape<128, false, false>>(args, chunks, stream);
    }
  } else if (fast) {
    online ? launch_channel_gradients<ChannelShape<64, true, true>>(args, chunks, stream)
           : launch_channel_gradients<ChannelShape<64, false, true>>(args, chunks, stream);
  } else {
    online ? launch_channel_gradients<ChannelShape<64, true, false>>(args, chunks, stream)
           : launch_channel_gradients<ChannelShape<64, false, false>>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
