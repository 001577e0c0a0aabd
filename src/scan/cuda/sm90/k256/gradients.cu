// gradients() of half of the channels of keys of 129 to 256 (kernels.h: K256Half). It is gradients/scalar
// (sm90/k256/gradients_keys.cu: gradients/channel) over 128 channels of its own. The chunk's A and R, dZ and the
// products of these are the same in both halves and are made twice.
#include "scan/cuda/sm90/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void k256_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  if (chunks == 0) return;
  const Rule& rule = args.problem.rule;
  const bool k256 = k256_rule(rule);
  if (!k256 || (args.half.numbers == nullptr && args.half.norms == nullptr)) {
    fail_internal("k256_gradients: expected a rule for K above 128 and its scales or norms, got {}, {}",
                  k256 ? "such a rule" : "another rule", k256 ? "neither" : "some");
  }
  switch (select_k256(rule)) {
    case K256Form::kAdditive:
      return launch_scalar_gradients<ScalarShape<kHalfTileK, false, false, false, ScalarGain::kAny, true>>(args, chunks,
                                                                                                           stream);
    case K256Form::kRows:
      if (!gain_is_gate(rule)) return k256_gradients_gains(args, chunks, stream);
      return launch_scalar_gradients<ScalarShape<kHalfTileK, true, false, false, ScalarGain::kGate, true>>(args, chunks,
                                                                                                           stream);
    case K256Form::kSums:
      return k256_gradients_sums(args, chunks, stream);
    case K256Form::kKeys:
      return k256_gradients_keys(args, chunks, stream);
  }
}

}  // namespace fw::cuda
