#include "nn/block.h"

#include <new>
#include <type_traits>
#include <utility>

#include "base/arena_mark.h"
#include "nn/activations.h"
#include "ops/backend.h"

namespace fw {

template <class T>
void settle(const Pass<T>& pass, Residual<T>& r, const RowNorm<T>& norm, Mat<T> y, Wide<T>* rstd) {
  if (!r.pending) {
    norm.forward(pass, r.x, y, rstd);
  } else if (pass.keep) {
    norm.add_forward(pass, r.delta, r.x, y, rstd);
    r.x = r.delta;
  } else {
    norm.add_forward(pass, r.x, r.delta, y, rstd);
  }
  r.pending = false;
}

namespace {

// What is kept lies in pass.exec's arena, what backward recomputes in pass.recompute_exec's, which each half of a
// block finds empty. Where all is kept there is one arena, and nothing is given back before backward.
template <class T>
void begin_half(const Pass<T>& pass) {
  if (pass.recompute_exec != nullptr) pass.recompute_exec->arena.release();
}

// On a GPU the last product of a half that takes_norm() makes the residual stream's sum: of float32, rounded once, and
// the next norm reads one tensor.
template <class T>
constexpr bool kSumsInProducts = std::is_same_v<T, Bf16>;
// So, where that is: y of the half, which is the residual stream after it.
template <class T>
Mat<T> begin_sum(Pass<T>& half, Residual<T>& r) {
  half.addend = r.x;
  std::swap(r.x, r.delta);
  return r.x;
}

}  // namespace

template <class T>
void Block<T>::mlp_forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y, Context& c) const {
  if (experts_ != nullptr) return experts_->forward(pass, x, y, c.experts);
  mlp_->forward(pass, x, state, y, c.mlp);
}

template <class T>
void Block<T>::mlp_backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  if (experts_ != nullptr) return experts_->backward(pass, c.experts, x, dy, dx);
  mlp_->backward(pass, c.mlp, x, dy, dx);
}

template <class T>
LayerState<T> Block<T>::copy_of(const Pass<T>& pass, LayerState<T> state) const {
  if (!state) return {};
  StateView* copies = pass.exec.contexts.template alloc<StateView>(state.count);
  for (int64_t i = 0; i < state.count; ++i) {
    StateView& copy = *new (copies + i) StateView(state.tensors[i]);
    // Null: pages of a cache. A token's row is written once, the second time the same.
    copy.data = new_copy(pass.exec, static_cast<const std::byte*>(copy.data), copy.bytes);
  }
  return {copies, state.count};
}

// A decoded token's half: the norm goes with the first products, and the last ones add to the residual stream, so that
// two kernels of a row each are none. Such a pass keeps nothing, so what it took from the arena is free after it.
template <class T>
template <class Run>
void Block<T>::step_half(const Pass<T>& pass, Residual<T>& r, const RowNorm<T>& norm, const Run& run) const {
  const ArenaMark mark(pass.exec.arena);
  Pass<T> half = pass;
  half.adds = true;
  if (r.pending || !norm.fits()) {
    const Mat<T> normed = new_matrix<T>(pass.exec.arena, r.x.rows, hidden_);
    settle(pass, r, norm, normed, pass.exec.arena.template alloc<Wide<T>>(r.x.rows));
    return run(half, normed);
  }
  half.norm = &norm;
  run(half, r.x);
}

// The mixer with x as its input; half: the pass with what its last product is to add.
template <class T>
void Block<T>::run_mixer(const Pass<T>& pass, const Pass<T>& half, Mat<const T> x, LayerState<T> state, Mat<T> y,
                         Context& c) const {
  const bool all = pass.recompute == Recompute::kAll;
  if (all) c.state = copy_of(pass, state);
  const Arena::Mark contexts = pass.exec.contexts.mark();
  c.mixer = mixer_->forward(all ? half.on_transient_exec() : half, x, state, y);
  if (all) pass.exec.contexts.rewind(contexts);
}

// A half with its norm behind. The residual stream is summed first, then run(in, out); the norm of out is the next
// delta.
template <class T>
template <class Run>
void Block<T>::behind_half(const Pass<T>& pass, Residual<T>& r, const RowNorm<T>& norm, Mat<T>& in, Mat<T>& out,
                           Wide<T>*& rstd, const Run& run) const {
  Arena& arena = pass.exec.arena;
  begin_half(pass);
  if (r.pending && pass.keep) {
    pass.exec.add_rows(r.x, r.delta);
    r.x = r.delta;
  } else if (r.pending) {
    pass.exec.add_rows(r.delta, r.x);
  }
  in = r.x;
  out = new_matrix<T>(arena, r.x.rows, hidden_);
  run(in, out);
  if (pass.keep) r.delta = new_matrix<T>(arena, r.x.rows, hidden_);
  rstd = arena.alloc<Wide<T>>(r.x.rows);
  norm.forward(pass, out, r.delta, rstd);
  r.pending = true;
}

template <class T>
void Block<T>::forward(const Pass<T>& pass, Residual<T>& r, LayerState<T> state, Context* context) const {
  Arena& arena = pass.exec.arena;
  Arena& transient = pass.transient_exec().arena;
  const Arena::Mark mark = arena.mark();
  const int64_t tokens = r.x.rows;
  Context local;
  Context& c = pass.keep ? *context : local;
  const LayerState<T> of_mixer = state ? LayerState<T>(state.tensors, mixer_tensors_) : LayerState<T>();
  const LayerState<T> of_mlp =
      state ? LayerState<T>(state.tensors + mixer_tensors_, state.count - mixer_tensors_) : LayerState<T>();

  if (norm_position_ == NormPosition::kBehind) {
    behind_half(pass, r, mixer_norm_, c.mixer_in, c.mixer_out, c.mixer_rstd,
                [&](Mat<const T> x, Mat<T> y) { run_mixer(pass, pass, x, of_mixer, y, c); });
    if (!pass.keep) arena.rewind(mark);
    if (mlp_norm_ == nullptr) return;
    behind_half(pass, r, *mlp_norm_, c.mlp_in, c.mlp_out, c.mlp_rstd,
                [&](Mat<const T> x, Mat<T> y) { mlp_forward(pass, x, of_mlp, y, c); });
    if (!pass.keep) arena.rewind(mark);
    return;
  }

  if (!pass.keep && tokens <= row_limits(pass.exec.device).decode && pass.layout.host.single_tokens() &&
      mixer_->takes_norm() && (mlp_norm_ == nullptr || mlp_takes_norm())) {
    step_half(pass, r, mixer_norm_,
              [&](const Pass<T>& half, Mat<const T> x) { mixer_->forward(half, x, of_mixer, r.x); });
    if (mlp_norm_ != nullptr)
      step_half(pass, r, *mlp_norm_,
                [&](const Pass<T>& half, Mat<const T> x) { mlp_forward(half, x, of_mlp, r.x, c); });
    return;
  }

  begin_half(pass);
  Mat<T> normed = new_matrix<T>(transient, tokens, hidden_);
  c.mixer_rstd = arena.alloc<Wide<T>>(tokens);
  settle(pass, r, mixer_norm_, normed, c.mixer_rstd);
  c.mixer_in = r.x;
  c.mixer_normed = normed;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  const Arena::Mark mixer_mark = arena.mark();
  Pass<T> half = pass;
  r.pending = !(kSumsInProducts<T> && mixer_->takes_norm());
  const Mat<T> out = r.pending ? r.delta : begin_sum(half, r);
  run_mixer(pass, half, normed, of_mixer, out, c);
  if (mlp_norm_ == nullptr) {
    if (!pass.keep) arena.rewind(mark);
    return;
  }

  // Without contexts the mixer's scratch and the normed input are free again.
  if (!pass.keep) arena.rewind(mixer_mark);
  begin_half(pass);
  if (pass.keep) normed = new_matrix<T>(transient, tokens, hidden_);
  c.mlp_rstd = arena.alloc<Wide<T>>(tokens);
  settle(pass, r, *mlp_norm_, normed, c.mlp_rstd);
  c.mlp_in = r.x;
  c.mlp_normed = normed;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  Pass<T> second = pass;
  r.pending = !(kSumsInProducts<T> && mlp_takes_norm());
  const Mat<T> sum = r.pending ? r.delta : begin_sum(second, r);
  mlp_forward(second, normed, of_mlp, sum, c);
  if (!pass.keep) arena.rewind(mark);
}

// The normed input of a half as forward had it, at the beginning of that half's backward.
template <class T>
Mat<T> Block<T>::recompute_norm(const Pass<T>& pass, Mat<T> in, const RowNorm<T>& norm, Wide<T>* rstd,
                                Mat<T> kept) const {
  if (pass.recompute_exec == nullptr) return kept;
  begin_half(pass);
  const Mat<T> normed = new_matrix<T>(pass.recompute_exec->arena, in.rows, hidden_);
  norm.forward(pass, in, normed, rstd);
  return normed;
}

template <class T>
void Block<T>::mixer_backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  if (pass.recompute != Recompute::kAll) return mixer_->backward(pass, c.mixer, x, dy, dx);
  Pass<T> there = pass.on_transient_exec();
  there.observer = nullptr;  // it has seen this layer
  const Arena::Mark contexts = pass.exec.contexts.mark();
  MixerContext* mixer = mixer_->forward(there, x, c.state, Mat<T>());
  mixer_->backward(there, mixer, x, dy, dx);
  pass.exec.contexts.rewind(contexts);
}

// The inputs of mixer and MLP are the residual stream itself, which is kept, so no norm is recomputed.
template <class T>
void Block<T>::backward_behind(const Pass<T>& pass, Context& c, Mat<T> dx) const {
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const Mat<T> d_out = new_matrix<T>(arena, dx.rows, hidden_), d_in = new_matrix<T>(arena, dx.rows, hidden_);
  const Arena::Mark half = arena.mark();
  if (mlp_norm_ != nullptr) {
    begin_half(pass);
    mlp_norm_->backward(pass, dx, c.mlp_out, c.mlp_rstd, d_out, Write::kOverwrite);
    mlp_backward(pass, c, c.mlp_in, d_out, d_in);
    pass.exec.add_rows(d_in, dx);
    arena.rewind(half);
  }
  begin_half(pass);
  mixer_norm_.backward(pass, dx, c.mixer_out, c.mixer_rstd, d_out, Write::kOverwrite);
  mixer_backward(pass, c, c.mixer_in, d_out, d_in);
  pass.exec.add_rows(d_in, dx);
  arena.rewind(mark);
}

template <class T>
void Block<T>::backward(const Pass<T>& pass, Context& c, Mat<T> dx) const {
  if (norm_position_ == NormPosition::kBehind) return backward_behind(pass, c, dx);
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const Mat<T> dnormed = new_matrix<T>(arena, dx.rows, hidden_);
  const Arena::Mark half = arena.mark();
  if (mlp_norm_ != nullptr) {
    const Mat<T> normed = recompute_norm(pass, c.mlp_in, *mlp_norm_, c.mlp_rstd, c.mlp_normed);
    mlp_backward(pass, c, normed, dx, dnormed);
    mlp_norm_->backward(pass, dnormed, c.mlp_in, c.mlp_rstd, dx, Write::kAccumulate);
    arena.rewind(half);
  }
  const Mat<T> normed = recompute_norm(pass, c.mixer_in, mixer_norm_, c.mixer_rstd, c.mixer_normed);
  mixer_backward(pass, c, normed, dx, dnormed);
  mixer_norm_.backward(pass, dnormed, c.mixer_in, c.mixer_rstd, dx, Write::kAccumulate);
  arena.rewind(mark);
}

template void settle<float>(const Pass<float>&, Residual<float>&, const RowNorm<float>&, Mat<float>, float*);
template void settle<double>(const Pass<double>&, Residual<double>&, const RowNorm<double>&, Mat<double>, double*);
template void settle<Bf16>(const Pass<Bf16>&, Residual<Bf16>&, const RowNorm<Bf16>&, Mat<Bf16>, float*);
template class Block<float>;
template class Block<double>;
template class Block<Bf16>;

}  // namespace fw
