// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/device/gradient_channel_kernel.cuh"

namespace fw::cuda {
namespace {

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Rule& rule = x.rule;
  const bool erase_gate = rule.uses_erase_gate() && rule.erase == Gate::kChannel, write_gate = rule.write == Gate::kChannel;
  const bool copied = whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K) && (!erase_gate || whole_pieces(x.in.erase_gate, x.K)) &&
                      (!write_gate || whole_pieces(x.in.write_gate, x.V));
  if (copied && ungated_streams(rule) && rule.uses_precond()) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true, false, true>>(args, chunks, stream);
  } else if (copied && ungated_streams(rule)) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true>>(args, chunks, stream);
  } else if (kOnline && copied && gated_streams(rule) && !rule.uses_precond()) {
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
