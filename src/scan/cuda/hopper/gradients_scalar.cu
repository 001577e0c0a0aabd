// gradients() of kernels.h for rules with scalar or constant decay, or none.
#include "scan/cuda/device/gradient_kernel.cuh"

namespace fw::cuda {

void gradients_scalar(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_gradients<GradientShape<128, false, true>>(args, chunks, stream) : launch_gradients<GradientShape<128, false, false>>(args, chunks, stream);
  } else {
    online ? launch_gradients<GradientShape<64, false, true>>(args, chunks, stream) : launch_gradients<GradientShape<64, false, false>>(args, chunks, stream);
  }
}

void gradients(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  args.problem.rule.decay == Decay::kChannel ? gradients_channel(args, key, chunks, stream) : gradients_scalar(args, key, chunks, stream);
}

}  // namespace fw::cuda
