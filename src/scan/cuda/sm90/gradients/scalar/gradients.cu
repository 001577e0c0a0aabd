// gradients() of kernels.h for rules with scalar or constant decay, or none: the kernel of rows that are streams, and
// the general one.
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/gradients/general/kernel.cuh"
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {
namespace {

constexpr ScalarGradientTraits with(ScalarGradientTraits traits, RowM m, ScalarGain gain) {
  traits.m = m, traits.gain = gain;
  return traits;
}
constexpr ScalarGradientTraits with_head_sums(ScalarGradientTraits traits) {
  traits.sums_heads = true;
  return traits;
}

template <ScalarGradientTraits kTraits>
void launch_traits(const GradientArgs& args, int64_t chunks, void* stream) {
  // gradients_sum_heads()
  constexpr bool kMaySumHeads = kTraits.is_delta && kTraits.m == RowM::kNone &&
                                (kTraits.gain == ScalarGain::kGate || kTraits.gain == ScalarGain::kTied);
  if constexpr (kMaySumHeads) {
    if (args.head_sums != nullptr)
      return launch_scalar_gradients<ScalarShape<with_head_sums(kTraits)>>(args, chunks, stream);
  }
  launch_scalar_gradients<ScalarShape<kTraits>>(args, chunks, stream);
}

// Of those with M only gains that are gates have a kernel of their own, and none of additive rules.
template <ScalarGradientTraits kTraits, RowM kM>
void launch_gain(const GradientArgs& args, bool gate, int64_t chunks, void* stream) {
  if constexpr (kTraits.is_delta) {
    if (gate) return launch_traits<with(kTraits, kM, ScalarGain::kGate)>(args, chunks, stream);
  }
  launch_traits<with(kTraits, kM, ScalarGain::kAny)>(args, chunks, stream);
}

// kTraits: without M and gain.
template <ScalarGradientTraits kTraits>
void launch_kernel(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream) {
  constexpr GeneralGradientTraits kGeneral{.k_tile = kTraits.k_tile, .is_delta = kTraits.is_delta};
  if constexpr (kTraits.is_delta) {
    constexpr GeneralGradientTraits kUnscaled{.k_tile = kTraits.k_tile, .is_delta = true, .has_unscaled_keys = true};
    if (kernel == GradientKernel::kAnyUnscaled)
      return launch_general_gradients<GeneralShape<kUnscaled>>(args, chunks, stream);
    if (kernel == GradientKernel::kResidual)
      return launch_traits<with(kTraits, RowM::kNone, ScalarGain::kTied)>(args, chunks, stream);
    if (kernel == GradientKernel::kUnscaled)
      return launch_traits<with(kTraits, RowM::kNone, ScalarGain::kUnscaled)>(args, chunks, stream);
    if (kernel == GradientKernel::kUnscaledDecays)
      return launch_traits<with(kTraits, RowM::kNone, ScalarGain::kUnscaledDecays)>(args, chunks, stream);
  }
  if (kernel == GradientKernel::kAnyRows) return launch_general_gradients<GeneralShape<kGeneral>>(args, chunks, stream);
  const bool makes = kernel == GradientKernel::kMakesM || kernel == GradientKernel::kGateMakesM,
             reads = kernel == GradientKernel::kReadsM || kernel == GradientKernel::kGateReadsM;
  const bool gate =
      kernel == GradientKernel::kGate || kernel == GradientKernel::kGateMakesM || kernel == GradientKernel::kGateReadsM;
  if (makes) return launch_gain<kTraits, RowM::kMade>(args, gate, chunks, stream);
  if (reads) return launch_gain<kTraits, RowM::kRead>(args, gate, chunks, stream);
  launch_gain<kTraits, RowM::kNone>(args, gate, chunks, stream);
}

}  // namespace

void gradients_scalar(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  with_constants(
      [&](auto small, auto is_delta) {
        launch_kernel<ScalarGradientTraits{.k_tile = small ? 64 : 128, .is_delta = is_delta}>(args, kernel, chunks,
                                                                                              stream);
      },
      k_tile == 64, args.problem.rule.is_delta());
}

}  // namespace fw::cuda
