// gradients() of kernels.h for rules with scalar or constant decay, or none.
#include "scan/cuda/device/gradient_fast_kernel.cuh"

namespace fw::cuda {

void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream);
bool gradients_channel_make_m(const GradientArgs& args);

namespace {

// plain_streams() with a preconditioner or without; without one, also linear_streams(), online.
bool fast_rows(const Problem& x) {
  const bool streams = plain_streams(x.rule) || (linear_streams(x.rule) && x.rule.online());
  return streams && whole_pieces(x.in.q, x.K) && whole_pieces(x.in.k, x.K);
}

template <int kKey, bool kOnline>
void launch_rows(const GradientArgs& args, int64_t chunks, void* stream) {
  if (kOnline && bare_keys(args.problem.rule)) {
    fast_rows(args.problem) ? launch_fast_gradients<FastShape<kKey, kOnline, false, false, kOnline>>(args, chunks, stream)
                            : launch_scalar_gradients<ScalarShape<kKey, kOnline, kOnline>>(args, chunks, stream);
  } else if (args.precond.rows != nullptr) {
    launch_fast_gradients<FastShape<kKey, kOnline, true, true>>(args, chunks, stream);
  } else if (fast_rows(args.problem) && args.problem.rule.uses_precond()) {
    launch_fast_gradients<FastShape<kKey, kOnline, true>>(args, chunks, stream);
  } else if (kOnline && fast_rows(args.problem) && gain_by_residual(args.problem.rule)) {
    launch_fast_gradients<FastShape<kKey, kOnline, false, false, false, kOnline>>(args, chunks, stream);
  } else if (fast_rows(args.problem)) {
    launch_fast_gradients<FastShape<kKey, kOnline>>(args, chunks, stream);
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
