// gradients() of kernels.h for rules with scalar or constant decay, or none.
#include "scan/cuda/gradients/scalar/kernel.cuh"

namespace fw::cuda {

void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream);
bool gradients_channel_make_m(const GradientArgs& args);

namespace {

// plain_streams() with a preconditioner or without; without one, also linear_streams(), online.
bool fast_rows(const Problem& x) {
  const bool streams = plain_streams(x.rule) || (linear_streams(x.rule) && x.rule.online());
  return streams && whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K);
}

// kOnline rules of kGain, kAny else.
template <int kKey, bool kOnline, bool kPrecond, bool kMakes, FastGain kGain>
void launch_fast(const GradientArgs& args, int64_t chunks, void* stream) {
  launch_fast_gradients<FastShape<kKey, kOnline, kPrecond, kMakes, kOnline ? kGain : FastGain::kAny>>(args, chunks, stream);
}

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  const Rule& rule = args.problem.rule;
  const bool fast = fast_rows(args.problem), gate = gain_is_gate(rule);
  if (kOnline && bare_keys(rule)) {
    if (!fast) return launch_scalar_gradients<ScalarShape<kKey, kOnline, kOnline>>(args, chunks, stream);
    rule.decay == Decay::kScalar ? launch_fast<kKey, kOnline, false, false, FastGain::kBareDecays>(args, chunks, stream)
                                 : launch_fast<kKey, kOnline, false, false, FastGain::kBare>(args, chunks, stream);
  } else if (args.precond.rows != nullptr) {
    gate ? launch_fast<kKey, kOnline, true, true, FastGain::kGate>(args, chunks, stream)
         : launch_fast<kKey, kOnline, true, true, FastGain::kAny>(args, chunks, stream);
  } else if (fast && rule.uses_precond()) {
    gate ? launch_fast<kKey, kOnline, true, false, FastGain::kGate>(args, chunks, stream)
         : launch_fast<kKey, kOnline, true, false, FastGain::kAny>(args, chunks, stream);
  } else if (fast) {
    gate                     ? launch_fast<kKey, kOnline, false, false, FastGain::kGate>(args, chunks, stream)
    : gain_by_residual(rule) ? launch_fast<kKey, kOnline, false, false, FastGain::kTied>(args, chunks, stream)
                             : launch_fast<kKey, kOnline, false, false, FastGain::kAny>(args, chunks, stream);
  } else {
    launch_scalar_gradients<ScalarShape<kKey, kOnline>>(args, chunks, stream);
  }
}

}  // namespace

bool gradients_make_m(const GradientArgs& args) {
  const Problem& x = args.problem;
  if (!x.rule.uses_precond() || !x.rule.precond_squashed() || x.group != 1) return false;
  return x.rule.decay == Decay::kChannel ? gradients_channel_make_m(args) : fast_rows(x);
}

void gradients(const GradientArgs& args, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.decay == Decay::kChannel) {
    gradients_channel(args, key, chunks, stream);
  } else if (args.problem.rule.online()) {
    key == 128 ? launch_rows<128, true>(args, chunks, stream) : launch_rows<64, true>(args, chunks, stream);
  } else {
    key == 128 ? launch_rows<128, false>(args, chunks, stream) : launch_rows<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
