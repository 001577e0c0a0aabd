// k256_gradients() of rules whose streams are sums of q and k: the form of gradients/scalar for any gain, with the
// gates of one number.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void k256_gradients_sums(const GradientArgs& args, int64_t chunks, void* stream) {
  if (args.half.norms == nullptr) fail_internal("k256_gradients_sums: expected norms of rows, got null");
  constexpr ScalarGradientTraits kAny{.k_tile = kHalfTileK, .gain = ScalarGain::kAny, .has_half_of_keys = true};
  launch_scalar_gradients<ScalarShape<kAny>>(args, chunks, stream);
}

}  // namespace fw::cuda
