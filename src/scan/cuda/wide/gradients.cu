// gradients() of half of the channels of keys of 129 to 256 (kernels.h: WideHalf): gradients/scalar over 128 channels of its own, of which the chunk's A and R,
// dZ and the products of these are the same in both halves and are made twice.
#include "scan/cuda/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void wide_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  if (chunks == 0) return;
  const Rule& rule = args.problem.rule;
  if (!wide_rule(rule) || args.half.numbers == nullptr) {
    fail_internal("wide_gradients: expected a rule with wide keys and its numbers, got {}, numbers {}", wide_rule(rule) ? "such a rule" : "another rule",
                  args.half.numbers != nullptr ? "there" : "null");
  }
  if (select_wide(rule) == WideForm::kSums) {
    wide_gradients_sums(args, chunks, stream);
  } else if (rule.online()) {
    launch_scalar_gradients<ScalarShape<kHalfKey, true, false, false, ScalarGain::kGate, true>>(args, chunks, stream);
  } else {
    launch_scalar_gradients<ScalarShape<kHalfKey, false, false, false, ScalarGain::kAny, true>>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
