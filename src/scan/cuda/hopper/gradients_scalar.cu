// gradients() of kernels.h for rules with scalar or constant decay, or none.
#include "scan/cuda/device/gradient_scalar_kernel.cuh"

namespace fw::cuda {

void gradients_channel(const GradientArgs& args, int key, bool copied, int64_t chunks, void* stream);

namespace {

// Rows of 16-byte pieces, wherever a sequence or head begins.
bool whole_pieces(const TokenArg& x) {
  return x.data != nullptr && x.bf16 != 0 && ((x.stride_b | x.stride_t | x.stride_h) & 7) == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0;
}

// Of what the streams are made of.
bool copied_rows(const Problem& x) {
  const bool gate = x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel;
  return whole_pieces(x.in.q) && whole_pieces(x.in.k) && (!gate || whole_pieces(x.in.erase_gate)) && x.K % 8 == 0;
}

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  if (plain_streams(args.problem.rule) && copied_rows(args.problem)) {
    launch_scalar_gradients<ScalarShape<kKey, kOnline, true>>(args, chunks, stream);
  } else {
    launch_scalar_gradients<ScalarShape<kKey, kOnline, false>>(args, chunks, stream);
  }
}

}  // namespace

void gradients(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.decay == Decay::kChannel) {
    gradients_channel(args, key, copied_rows(args.problem), chunks, stream);
  } else if (args.problem.rule.online()) {
    key == 128 ? launch_rows<128, true>(args, chunks, stream) : launch_rows<64, true>(args, chunks, stream);
  } else {
    key == 128 ? launch_rows<128, false>(args, chunks, stream) : launch_rows<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
