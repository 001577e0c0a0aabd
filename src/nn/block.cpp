#include "nn/block.h"

#include <new>

#include "nn/activations.h"

namespace fw {

ParamSpec norm_parameter(const std::string& name, int64_t size) { return {name, {size}, constant_init(1.0), false}; }

template <class T>
void settle(const Pass<T>& pass, Residual<T>& r, const Wide<T>* weight, Wide<T> eps, Mat<T> y, Wide<T>* rstd) {
  if (!r.pending) {
    pass.exec.rmsnorm_forward(r.x, weight, eps, y, rstd);
  } else if (pass.keep) {
    pass.exec.add_rmsnorm_forward(r.delta, r.x, weight, eps, y, rstd);
    r.x = r.delta;
  } else {
    pass.exec.add_rmsnorm_forward(r.x, r.delta, weight, eps, y, rstd);
  }
  r.pending = false;
}

namespace {

// What is kept lies in pass.exec's arena, what backward computes again in pass.again's, which each half of a block finds empty. Where all is
// kept there is one arena, and nothing is given back before backward.
template <class T>
void begin_half(const Pass<T>& pass) {
  if (pass.again != nullptr) pass.again->arena.release();
}

}  // namespace

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

template <class T>
void Block<T>::forward(const Pass<T>& pass, Residual<T>& r, LayerState<T> state, Context* context) const {
  const Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  Arena& passing = pass.passing().arena;
  const Arena::Mark mark = arena.mark();
  const int64_t tokens = r.x.rows;
  Context local;
  Context& c = pass.keep ? *context : local;

  begin_half(pass);
  Mat<T> normed = new_matrix<T>(passing, tokens, hidden_);
  c.mixer_rstd = arena.alloc<Wide<T>>(tokens);
  settle(pass, r, params.value(mixer_norm_), eps_, normed, c.mixer_rstd);
  c.mixer_in = r.x;
  c.mixer_normed = normed;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  const Arena::Mark mixer_mark = arena.mark();
  const bool all = pass.recompute == Recompute::kAll;
  if (all) c.state = copy_of(pass, state);
  const Arena::Mark contexts = pass.exec.contexts.mark();
  c.mixer = mixer_->forward(all ? pass.keeping_there() : pass, normed, state, r.delta);
  if (all) pass.exec.contexts.rewind(contexts);
  r.pending = true;
  if (mlp_ == nullptr) {
    if (!pass.keep) arena.rewind(mark);
    return;
  }

  // Without contexts the mixer's scratch and the normed input are free again.
  if (!pass.keep) arena.rewind(mixer_mark);
  begin_half(pass);
  if (pass.keep) normed = new_matrix<T>(passing, tokens, hidden_);
  c.mlp_rstd = arena.alloc<Wide<T>>(tokens);
  settle(pass, r, params.value(mlp_norm_), eps_, normed, c.mlp_rstd);
  c.mlp_in = r.x;
  c.mlp_normed = normed;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  mlp_->forward(pass, normed, r.delta, c.mlp);
  r.pending = true;
  if (!pass.keep) arena.rewind(mark);
}

// The normed input of a half as forward had it, at the beginning of that half's backward.
template <class T>
Mat<T> Block<T>::normed_again(const Pass<T>& pass, Mat<T> in, int norm, Wide<T>* rstd, Mat<T> kept) const {
  if (pass.again == nullptr) return kept;
  begin_half(pass);
  const Mat<T> normed = new_matrix<T>(pass.again->arena, in.rows, hidden_);
  pass.exec.rmsnorm_forward(in, pass.params.value(norm), eps_, normed, rstd);
  return normed;
}

template <class T>
void Block<T>::backward(const Pass<T>& pass, Context& c, Mat<T> dx) const {
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const Mat<T> dnormed = new_matrix<T>(arena, dx.rows, hidden_);
  const Arena::Mark half = arena.mark();
  if (mlp_ != nullptr) {
    const Mat<T> normed = normed_again(pass, c.mlp_in, mlp_norm_, c.mlp_rstd, c.mlp_normed);
    mlp_->backward(pass, c.mlp, normed, dx, dnormed);
    pass.exec.rmsnorm_backward(dnormed, c.mlp_in, params.value(mlp_norm_), c.mlp_rstd, dx, params.grad(mlp_norm_), Write::kAccumulate);
    arena.rewind(half);
  }
  const Mat<T> normed = normed_again(pass, c.mixer_in, mixer_norm_, c.mixer_rstd, c.mixer_normed);
  if (pass.recompute == Recompute::kAll) {
    Pass<T> there = pass.keeping_there();
    there.observer = nullptr;  // it has seen this layer
    const Arena::Mark contexts = pass.exec.contexts.mark();
    MixerContext* mixer = mixer_->forward(there, normed, c.state, new_matrix<T>(pass.again->arena, dx.rows, hidden_));
    mixer_->backward(there, mixer, normed, dx, dnormed);
    pass.exec.contexts.rewind(contexts);
  } else {
    mixer_->backward(pass, c.mixer, normed, dx, dnormed);
  }
  pass.exec.rmsnorm_backward(dnormed, c.mixer_in, params.value(mixer_norm_), c.mixer_rstd, dx, params.grad(mixer_norm_), Write::kAccumulate);
  arena.rewind(mark);
}

template void settle<float>(const Pass<float>&, Residual<float>&, const float*, float, Mat<float>, float*);
template void settle<double>(const Pass<double>&, Residual<double>&, const double*, double, Mat<double>, double*);
template void settle<Bf16>(const Pass<Bf16>&, Residual<Bf16>&, const float*, float, Mat<Bf16>, float*);
template class Block<float>;
template class Block<double>;
template class Block<Bf16>;

}  // namespace fw
