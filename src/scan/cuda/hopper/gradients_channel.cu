// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/device/gradient_channel_kernel.cuh"

namespace fw::cuda {
namespace {

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Rule& rule = x.rule;
  const bool gate = rule.uses_erase_gate() && rule.erase == Gate::kChannel, online = kOnline;
  const bool copied = whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K) && (!gate || whole_pieces(x.in.erase_gate, x.K));
  if (copied && plain_streams(rule) && !rule.uses_precond()) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true>>(args, chunks, stream);
  } else if (online && copied && gated_streams(rule)) {
    launch_channel_gradients<ChannelShape<kKey, true, true, true>>(args, chunks, stream);
  } else {
    launch_channel_gradients<ChannelShape<kKey, kOnline, false>>(args, chunks, stream);
  }
}

}  // namespace

void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.online()) {
    key == 128 ? launch_rows<128, true>(args, chunks, stream) : launch_rows<64, true>(args, chunks, stream);
  } else {
    key == 128 ? launch_rows<128, false>(args, chunks, stream) : launch_rows<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
