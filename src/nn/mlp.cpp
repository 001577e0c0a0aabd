#include "nn/mlp.h"

#include "nn/activations.h"

namespace fw {

template <class T>
Mlp<T>::Mlp(const MlpSpec& spec, const std::string& prefix, Params<T>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mlp_parameters(spec, prefix);
  gate_up_ = params.declare(std::move(list[0]));
  params.declare(std::move(list[1]));
  down_ = params.declare(std::move(list[2]));
}

template <class T>
void Mlp<T>::forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& c) const {
  const Params<T>& params = pass.params;
  c.x = x;
  c.gate_up = new_matrix<T>(pass.arena, x.rows, 2 * spec_.size);
  linear_forward<T>(x, params.matrix(gate_up_, 2 * spec_.size, spec_.hidden), nullptr, c.gate_up, pass.precision);
  c.act = new_matrix<T>(pass.arena, x.rows, spec_.size);
  swiglu_forward<T>(c.gate_up.col_range(0, spec_.size), c.gate_up.col_range(spec_.size, spec_.size), c.act);
  linear_forward<T>(c.act, params.matrix(down_, spec_.hidden, spec_.size), nullptr, y, pass.precision);
}

template <class T>
void Mlp<T>::backward(const Pass<T>& pass, Context& c, Mat<const T> dy, Mat<T> dx) const {
  Params<T>& params = pass.params;
  const Mat<T> gate = c.gate_up.col_range(0, spec_.size), up = c.gate_up.col_range(spec_.size, spec_.size);
  const Mat<T> dact = new_matrix<T>(pass.arena, dy.rows, spec_.size);
  linear_backward<T>(dy, c.act, params.matrix(down_, spec_.hidden, spec_.size), dact, params.grad_matrix(down_, spec_.hidden, spec_.size), nullptr,
                     pass.precision);
  swiglu_backward<T>(dact, gate, up, gate, up);
  linear_backward<T>(c.gate_up, c.x, params.matrix(gate_up_, 2 * spec_.size, spec_.hidden), dx, params.grad_matrix(gate_up_, 2 * spec_.size, spec_.hidden),
                     nullptr, pass.precision);
}

template class Mlp<float>;
template class Mlp<double>;

}  // namespace fw
