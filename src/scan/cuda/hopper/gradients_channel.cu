// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/device/gradient_kernel.cuh"

namespace fw::cuda {

void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_gradients<GradientShape<128, true, true>>(args, chunks, stream) : launch_gradients<GradientShape<128, true, false>>(args, chunks, stream);
  } else {
    online ? launch_gradients<GradientShape<64, true, true>>(args, chunks, stream) : launch_gradients<GradientShape<64, true, false>>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
