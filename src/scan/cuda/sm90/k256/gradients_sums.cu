// k256_gradients() of rules whose streams are sums of q and k: the form of gradients/scalar for any gain, with the
// gates of one number.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void k256_gradients_sums(const GradientArgs& args, int64_t chunks, void* stream) {
  if (args.half.norms == nullptr) fail_internal("k256_gradients_sums: expected norms of rows, got null");
  launch_scalar_gradients<ScalarShape<kHalfTileK, true, false, false, ScalarGain::kAny, true>>(args, chunks, stream);
}

}  // namespace fw::cuda
