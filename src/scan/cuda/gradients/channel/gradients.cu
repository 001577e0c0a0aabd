// gradients() of kernels.h for rules with channel decay.
#include "scan/cuda/gradients/channel/kernel.cuh"

namespace fw::cuda {
namespace {

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Rule& rule = x.rule;
  const bool erase_gate = rule.uses_erase_gate() && rule.erase == Gate::kChannel, write_gate = rule.write == Gate::kChannel;
  const bool copied = whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K) && (!erase_gate || whole_pieces(x.in.erase_gate, x.K)) &&
                      (!write_gate || whole_pieces(x.in.write_gate, x.V));
  if (args.precond.rows != nullptr) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true, false, RowM::kMade>>(args, chunks, stream);
  } else if (copied && ungated_streams(rule) && rule.uses_precond()) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true, false, RowM::kRead>>(args, chunks, stream);
  } else if (copied && ungated_streams(rule)) {
    launch_channel_gradients<ChannelShape<kKey, kOnline, true>>(args, chunks, stream);
  } else if (kOnline && copied && gated_streams(rule) && !rule.uses_precond()) {
    launch_channel_gradients<ChannelShape<kKey, true, true, true>>(args, chunks, stream);
  } else {
    launch_channel_gradients<ChannelShape<kKey, kOnline, false>>(args, chunks, stream);
  }
}

}  // namespace

bool gradients_channel_make_m(const GradientArgs& args) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  if (x.precond_rows == nullptr || x.rule.preconditions_read() == x.rule.online() || !ungated_streams(x.rule)) return false;
  return whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K) && whole_pieces(x.in.v, x.V) && whole_pairs(x.in.g, x.K) && whole_pieces(args.d_o, x.V) &&
         whole_pieces(d.q, x.K) && whole_pieces(d.k, x.K) && whole_pieces(d.v, x.V) && whole_pairs(d.g, x.K);
}

void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.online()) {
    key == 128 ? launch_rows<128, true>(args, chunks, stream) : launch_rows<64, true>(args, chunks, stream);
  } else {
    key == 128 ? launch_rows<128, false>(args, chunks, stream) : launch_rows<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
