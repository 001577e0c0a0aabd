// gradients() of kernels.h for rules with scalar or constant decay, or none: the kernel of rows that are streams, and the general one.
#include "scan/cuda/gradients/general/kernel.cuh"
#include "scan/cuda/gradients/launchers.h"
#include "scan/cuda/gradients/scalar/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kKey, bool kOnline, RowM kM, ScalarGain kGain>
void launch_kernel(const GradientArgs& args, int64_t chunks, void* stream) {
  if constexpr (kOnline && kM == RowM::kNone && (kGain == ScalarGain::kGate || kGain == ScalarGain::kTied)) {  // gradients_sum_heads()
    using Shape = ScalarShape<kKey, kOnline, false, false, kGain, false, true>;
    if (args.head_sums != nullptr) return launch_scalar_gradients<Shape>(args, chunks, stream);
  }
  launch_scalar_gradients<ScalarShape<kKey, kOnline, kM != RowM::kNone, kM == RowM::kMade, kGain>>(args, chunks, stream);
}

// Gains of offline rules are kAny.
template <int kKey, bool kOnline, RowM kM>
void launch_gain(const GradientArgs& args, ScalarGain gain, int64_t chunks, void* stream) {
  if constexpr (kOnline) {
    if (gain == ScalarGain::kGate) return launch_kernel<kKey, kOnline, kM, ScalarGain::kGate>(args, chunks, stream);
  }
  if constexpr (kOnline && kM == RowM::kNone) {
    if (gain == ScalarGain::kTied) return launch_kernel<kKey, kOnline, kM, ScalarGain::kTied>(args, chunks, stream);
    if (gain == ScalarGain::kBare) return launch_kernel<kKey, kOnline, kM, ScalarGain::kBare>(args, chunks, stream);
    if (gain == ScalarGain::kBareDecays) return launch_kernel<kKey, kOnline, kM, ScalarGain::kBareDecays>(args, chunks, stream);
  }
  launch_kernel<kKey, kOnline, kM, ScalarGain::kAny>(args, chunks, stream);
}

template <int kKey, bool kOnline>
void launch_choice(const GradientArgs& args, const GradientChoice& choice, int64_t chunks, void* stream) {
  if (choice.kernel == GradientKernel::kGeneral) {
    kOnline&& choice.gain == ScalarGain::kBare ? launch_general_gradients<GeneralShape<kKey, kOnline, kOnline>>(args, chunks, stream)
                                               : launch_general_gradients<GeneralShape<kKey, kOnline>>(args, chunks, stream);
    return;
  }
  switch (choice.m) {
    case RowM::kNone:
      return launch_gain<kKey, kOnline, RowM::kNone>(args, choice.gain, chunks, stream);
    case RowM::kRead:
      return launch_gain<kKey, kOnline, RowM::kRead>(args, choice.gain, chunks, stream);
    case RowM::kMade:
      return launch_gain<kKey, kOnline, RowM::kMade>(args, choice.gain, chunks, stream);
  }
}

}  // namespace

void gradients_scalar(const GradientArgs& args, const GradientChoice& choice, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.online()) {
    key == 128 ? launch_choice<128, true>(args, choice, chunks, stream) : launch_choice<64, true>(args, choice, chunks, stream);
  } else {
    key == 128 ? launch_choice<128, false>(args, choice, chunks, stream) : launch_choice<64, false>(args, choice, chunks, stream);
  }
}

}  // namespace fw::cuda
