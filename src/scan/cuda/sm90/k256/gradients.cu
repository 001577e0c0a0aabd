// gradients() of half of the channels of keys of 129 to 256 (kernels.h: K256Half). It is gradients/scalar
// (sm90/k256/gradients_keys.cu: gradients/channel) over 128 channels of its own. The chunk's A and R, dZ and the
// products of these are the same in both calls and are made twice.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

// Gains that are gates, or none.
void k256_gradients_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  constexpr ScalarGradientTraits kGate{.k_tile = kHalfTileK, .gain = ScalarGain::kGate, .has_half_of_keys = true},
      kAdditive{.k_tile = kHalfTileK, .is_delta = false, .has_half_of_keys = true};
  args.problem.rule.is_delta() ? launch_scalar_gradients<ScalarShape<kGate>>(args, chunks, stream)
                               : launch_scalar_gradients<ScalarShape<kAdditive>>(args, chunks, stream);
}

}  // namespace fw::cuda
