#include "nn/mlp.h"

#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/norm.h"
#include "ops/backend.h"

namespace fw {

template <class T>
Mlp<T>::Mlp(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mlp_parameters(spec, prefix);
  const int first = params.declare(std::move(list[0])), second = params.declare(std::move(list[1]));
  down_ = params.declare(std::move(list[2]));
  mix_ = shifts() ? first : -1;
  gate_up_ = shifts() ? second : first;
}

template <class T>
void Mlp<T>::shift(const Pass<T>& pass, Mat<const T> x, T* tail_out, Context& c) const {
  if (!shifts()) return;
  c.shifted = new_matrix<T>(pass.transient_exec().arena, x.rows, spec_.hidden);
  pass.exec.token_shift_forward(x, pass.params.value(mix_), 1, pass.layout, c.tail, tail_out, c.shifted);
}

template <class T>
void Mlp<T>::project(const Pass<T>& pass, Mat<const T> x, Context& c) const {
  c.gate_up =
      new_matrix<T>((pass.recompute >= Recompute::kMlp ? pass.transient_exec() : pass.exec).arena, x.rows, width());
  pass.exec.linear_forward(shifts() ? c.shifted : x, pass.params.weight(gate_up_, width(), spec_.hidden), nullptr,
                           c.gate_up, Write::kOverwrite);
}

template <class T>
void Mlp<T>::activate(const Pass<T>& pass, Context& c) const {
  c.act = new_matrix<T>(pass.transient_exec().arena, c.gate_up.rows, spec_.size);
  if (shifts()) {
    pass.exec.feature_map_forward(FeatureMap::kSquaredRelu, c.gate_up, c.act);
  } else {
    pass.exec.swiglu_forward(c.gate_up.col_range(0, spec_.size), c.gate_up.col_range(spec_.size, spec_.size), c.act);
  }
}

template <class T>
void Mlp<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y, Context& c) const {
  if (shifts()) {
    T* tail = step_tails(pass, x, state, 0);
    c.tail = pass.keep ? new_copy<T, T>(pass.exec, tail, pass.layout.host.count() * spec_.hidden) : tail;
    shift(pass, x, tail, c);
  }
  if (pass.norm != nullptr) {
    c.act = new_matrix<T>(pass.exec.arena, x.rows, spec_.size);
    pass.norm->product(pass, x, pass.params.weight(gate_up_, width(), spec_.hidden), nullptr, true, {}, c.act);
  } else if (!pass.keep && !shifts() && x.rows <= row_limits(pass.exec.device).swiglu) {
    c.act = new_matrix<T>(pass.exec.arena, x.rows, spec_.size);
    pass.exec.swiglu_linear_forward(x, pass.params.weight(gate_up_, width(), spec_.hidden), c.act);
  } else {
    project(pass, x, c);
    activate(pass, c);
  }
  last_product(pass, Mat<const T>(c.act), pass.params.weight(down_, spec_.hidden, spec_.size), y);
}

template <class T>
void Mlp<T>::backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  Params<Wide<T>>& params = pass.params;
  if (pass.recompute_exec != nullptr) shift(pass, x, nullptr, c);
  if (pass.recompute >= Recompute::kMlp) project(pass, x, c);
  if (pass.recompute_exec != nullptr) activate(pass, c);
  const Mat<T> dact = new_matrix<T>(pass.exec.arena, dy.rows, spec_.size);
  pass.exec.linear_backward(dy, c.act, params.weight(down_, spec_.hidden, spec_.size), dact,
                            params.grad_matrix(down_, spec_.hidden, spec_.size), nullptr, Write::kOverwrite);
  Mat<const T> in = x;
  Mat<T> din = dx;
  if (shifts()) {
    pass.exec.feature_map_backward(FeatureMap::kSquaredRelu, dact, c.gate_up, c.gate_up);
    in = c.shifted;
    din = new_matrix<T>(pass.exec.arena, dy.rows, spec_.hidden);
  } else {
    const Mat<T> gate = c.gate_up.col_range(0, spec_.size), up = c.gate_up.col_range(spec_.size, spec_.size);
    pass.exec.swiglu_backward(dact, gate, up, gate, up);
  }
  pass.exec.linear_backward(c.gate_up, in, params.weight(gate_up_, width(), spec_.hidden), din,
                            params.grad_matrix(gate_up_, width(), spec_.hidden), nullptr, Write::kOverwrite);
  if (shifts())
    pass.exec.token_shift_backward(din, x, params.value(mix_), 1, pass.layout, c.tail, dx, params.grad(mix_));
}

template class Mlp<float>;
template class Mlp<double>;
template class Mlp<Bf16>;

}  // namespace fw
