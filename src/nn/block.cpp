#include "nn/block.h"

#include "nn/activations.h"

namespace fw {

ParamSpec norm_parameter(const std::string& name, int64_t size) { return {name, {size}, constant_init(1.0), false}; }

template <class T>
void settle(const Pass<T>& pass, Residual<T>& r, const T* weight, T eps, Mat<T> y, T* rstd) {
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

template <class T>
void Block<T>::forward(const Pass<T>& pass, Residual<T>& r, LayerState<T> state, Context* context) const {
  const Params<T>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const int64_t tokens = r.x.rows;
  Context local;
  Context& c = pass.keep ? *context : local;

  Mat<T> normed = new_matrix<T>(arena, tokens, hidden_);
  c.mixer_rstd = arena.alloc<T>(tokens);
  settle(pass, r, params.value(mixer_norm_), eps_, normed, c.mixer_rstd);
  c.mixer_in = r.x;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  const Arena::Mark mixer_mark = arena.mark();
  c.mixer = mixer_->forward(pass, normed, state, r.delta);
  r.pending = true;
  if (mlp_ == nullptr) {
    if (!pass.keep) arena.rewind(mark);
    return;
  }

  // Without contexts the mixer's scratch and the normed input are free again.
  if (!pass.keep) arena.rewind(mixer_mark);
  if (pass.keep) normed = new_matrix<T>(arena, tokens, hidden_);
  c.mlp_rstd = arena.alloc<T>(tokens);
  settle(pass, r, params.value(mlp_norm_), eps_, normed, c.mlp_rstd);
  c.mlp_in = r.x;
  if (pass.keep) r.delta = new_matrix<T>(arena, tokens, hidden_);
  mlp_->forward(pass, normed, r.delta, c.mlp);
  r.pending = true;
  if (!pass.keep) arena.rewind(mark);
}

template <class T>
void Block<T>::backward(const Pass<T>& pass, Context& c, Mat<T> dx) const {
  Params<T>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const Mat<T> dnormed = new_matrix<T>(arena, dx.rows, hidden_);
  const Arena::Mark half = arena.mark();
  if (mlp_ != nullptr) {
    mlp_->backward(pass, c.mlp, dx, dnormed);
    pass.exec.rmsnorm_backward(dnormed, c.mlp_in, params.value(mlp_norm_), c.mlp_rstd, dx, params.grad(mlp_norm_), Write::kAccumulate);
    arena.rewind(half);
  }
  mixer_->backward(pass, c.mixer, dx, dnormed);
  pass.exec.rmsnorm_backward(dnormed, c.mixer_in, params.value(mixer_norm_), c.mixer_rstd, dx, params.grad(mixer_norm_), Write::kAccumulate);
  arena.rewind(mark);
}

template void settle<float>(const Pass<float>&, Residual<float>&, const float*, float, Mat<float>, float*);
template void settle<double>(const Pass<double>&, Residual<double>&, const double*, double, Mat<double>, double*);
template class Block<float>;
template class Block<double>;

}  // namespace fw
