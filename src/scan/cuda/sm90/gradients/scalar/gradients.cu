// gradients() of kernels.h for rules with scalar or constant decay, or none: the kernel of rows that are streams, and
// the general one.
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/general/kernel.cuh"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kTileK, bool kDelta, RowM kM, ScalarGain kGain>
void launch_kernel(const GradientArgs& args, int64_t chunks, void* stream) {
  // gradients_sum_heads()
  if constexpr (kDelta && kM == RowM::kNone && (kGain == ScalarGain::kGate || kGain == ScalarGain::kTied)) {
    using Shape = ScalarShape<kTileK, kDelta, false, false, kGain, false, true>;
    if (args.head_sums != nullptr) return launch_scalar_gradients<Shape>(args, chunks, stream);
  }
  launch_scalar_gradients<ScalarShape<kTileK, kDelta, kM != RowM::kNone, kM == RowM::kMade, kGain>>(args, chunks,
                                                                                                    stream);
}

// Of those with M only gains that are gates have a kernel of their own, and none of additive rules.
template <int kTileK, bool kDelta, RowM kM>
void launch_gain(const GradientArgs& args, bool gate, int64_t chunks, void* stream) {
  if constexpr (kDelta) {
    if (gate) return launch_kernel<kTileK, kDelta, kM, ScalarGain::kGate>(args, chunks, stream);
  }
  launch_kernel<kTileK, kDelta, kM, ScalarGain::kAny>(args, chunks, stream);
}

template <int kTileK, bool kDelta>
void launch_kernel(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream) {
  if constexpr (kDelta) {
    if (kernel == GradientKernel::kAnyUnscaled)
      return launch_general_gradients<GeneralShape<kTileK, true, true>>(args, chunks, stream);
    if (kernel == GradientKernel::kResidual)
      return launch_kernel<kTileK, true, RowM::kNone, ScalarGain::kTied>(args, chunks, stream);
    if (kernel == GradientKernel::kUnscaled)
      return launch_kernel<kTileK, true, RowM::kNone, ScalarGain::kUnscaled>(args, chunks, stream);
    if (kernel == GradientKernel::kUnscaledDecays)
      return launch_kernel<kTileK, true, RowM::kNone, ScalarGain::kUnscaledDecays>(args, chunks, stream);
  }
  if (kernel == GradientKernel::kAnyRows)
    return launch_general_gradients<GeneralShape<kTileK, kDelta>>(args, chunks, stream);
  const bool makes = kernel == GradientKernel::kMakesM || kernel == GradientKernel::kGateMakesM,
             reads = kernel == GradientKernel::kReadsM || kernel == GradientKernel::kGateReadsM;
  const bool gate =
      kernel == GradientKernel::kGate || kernel == GradientKernel::kGateMakesM || kernel == GradientKernel::kGateReadsM;
  if (makes) return launch_gain<kTileK, kDelta, RowM::kMade>(args, gate, chunks, stream);
  if (reads) return launch_gain<kTileK, kDelta, RowM::kRead>(args, gate, chunks, stream);
  launch_gain<kTileK, kDelta, RowM::kNone>(args, gate, chunks, stream);
}

}  // namespace

void gradients_scalar(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  if (args.problem.rule.is_delta()) {
    k_tile == 128 ? launch_kernel<128, true>(args, kernel, chunks, stream)
                  : launch_kernel<64, true>(args, kernel, chunks, stream);
  } else {
    k_tile == 128 ? launch_kernel<128, false>(args, kernel, chunks, stream)
                  : launch_kernel<64, false>(args, kernel, chunks, stream);
  }
}

}  // namespace fw::cuda
