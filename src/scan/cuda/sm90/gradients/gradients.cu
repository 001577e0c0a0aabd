// gradients() of kernels.h: the choice of select.h as a kernel.
#include "scan/cuda/select.h"
#include "scan/cuda/sm90/gradients/common/launchers.h"

namespace fw::cuda {

void gradients(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  const GradientChoice choice = select_gradients(args);
  choice.kernel == GradientKernel::kChannel ? gradients_channel(args, choice, key, chunks, stream)
                                            : gradients_scalar(args, choice, key, chunks, stream);
}

}  // namespace fw::cuda
