// k256_gradients() of rules whose streams are rows of q and k and whose gain is none that is given: gradients/scalar
// with the gain's gradient by R.dZ.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void k256_gradients_gains(const GradientArgs& args, int64_t chunks, void* stream) {
  launch_scalar_gradients<ScalarShape<kHalfTileK, true, false, false, ScalarGain::kTied, true>>(args, chunks, stream);
}

}  // namespace fw::cuda
