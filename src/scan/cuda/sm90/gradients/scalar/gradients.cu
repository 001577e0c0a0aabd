// gradients() of kernels.h for rules with scalar or constant decay, or none: the kernel of rows that are streams, and
// the general one.
#include "scan/cuda/sm90/gradients/common/launchers.h"
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

// Gains of additive rules are kAny.
template <int kTileK, bool kDelta, RowM kM>
void launch_gain(const GradientArgs& args, ScalarGain gain, int64_t chunks, void* stream) {
  if constexpr (kDelta) {
    if (gain == ScalarGain::kGate) return launch_kernel<kTileK, kDelta, kM, ScalarGain::kGate>(args, chunks, stream);
  }
  if constexpr (kDelta && kM == RowM::kNone) {
    if (gain == ScalarGain::kTied) return launch_kernel<kTileK, kDelta, kM, ScalarGain::kTied>(args, chunks, stream);
    if (gain == ScalarGain::kUnscaled)
      return launch_kernel<kTileK, kDelta, kM, ScalarGain::kUnscaled>(args, chunks, stream);
    if (gain == ScalarGain::kUnscaledDecays)
      return launch_kernel<kTileK, kDelta, kM, ScalarGain::kUnscaledDecays>(args, chunks, stream);
  }
  launch_kernel<kTileK, kDelta, kM, ScalarGain::kAny>(args, chunks, stream);
}

template <int kTileK, bool kDelta>
void launch_choice(const GradientArgs& args, const GradientChoice& choice, int64_t chunks, void* stream) {
  if (choice.kernel == GradientKernel::kGeneral) {
    kDelta&& choice.gain == ScalarGain::kUnscaled
        ? launch_general_gradients<GeneralShape<kTileK, kDelta, kDelta>>(args, chunks, stream)
        : launch_general_gradients<GeneralShape<kTileK, kDelta>>(args, chunks, stream);
    return;
  }
  switch (choice.m) {
    case RowM::kNone:
      return launch_gain<kTileK, kDelta, RowM::kNone>(args, choice.gain, chunks, stream);
    case RowM::kRead:
      return launch_gain<kTileK, kDelta, RowM::kRead>(args, choice.gain, chunks, stream);
    case RowM::kMade:
      return launch_gain<kTileK, kDelta, RowM::kMade>(args, choice.gain, chunks, stream);
  }
}

}  // namespace

void gradients_scalar(const GradientArgs& args, const GradientChoice& choice, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.is_delta()) {
    key == 128 ? launch_choice<128, true>(args, choice, chunks, stream)
               : launch_choice<64, true>(args, choice, chunks, stream);
  } else {
    key == 128 ? launch_choice<128, false>(args, choice, chunks, stream)
               : launch_choice<64, false>(args, choice, chunks, stream);
  }
}

}  // namespace fw::cuda
