// k256_gradients() of rules whose streams are rows of q and k and whose gain is none that is given: gradients/scalar
// with the gain's gradient by R.dZ.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void k256_gradients_gains(const GradientArgs& args, int64_t chunks, void* stream) {
  constexpr ScalarGradientTraits kTied{.k_tile = kHalfTileK, .gain = ScalarGain::kTied, .has_half_of_keys = true};
  launch_scalar_gradients<ScalarShape<kTied>>(args, chunks, stream);
}

}  // namespace fw::cuda
