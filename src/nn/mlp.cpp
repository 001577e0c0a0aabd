#include "nn/mlp.h"

#include "nn/activations.h"

namespace fw {

template <class T>
Mlp<T>::Mlp(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mlp_parameters(spec, prefix);
  gate_up_ = params.declare(std::move(list[0]));
  params.declare(std::move(list[1]));
  down_ = params.declare(std::move(list[2]));
}

template <class T>
void Mlp<T>::project(const Pass<T>& pass, Mat<const T> x, Context& c) const {
  c.gate_up = new_matrix<T>((pass.recompute == Recompute::kAll ? pass.passing() : pass.exec).arena, x.rows, 2 * spec_.size);
  pass.exec.linear_forward(x, pass.params.weight(gate_up_, 2 * spec_.size, spec_.hidden), nullptr, c.gate_up, Write::kOverwrite);
}

template <class T>
void Mlp<T>::activate(const Pass<T>& pass, Context& c) const {
  c.act = new_matrix<T>(pass.passing().arena, c.gate_up.rows, spec_.size);
  pass.exec.swiglu_forward(c.gate_up.col_range(0, spec_.size), c.gate_up.col_range(spec_.size, spec_.size), c.act);
}

template <class T>
void Mlp<T>::forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& c) const {
  project(pass, x, c);
  activate(pass, c);
  pass.exec.linear_forward(c.act, pass.params.weight(down_, spec_.hidden, spec_.size), nullptr, y, Write::kOverwrite);
}

template <class T>
void Mlp<T>::backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  Params<Wide<T>>& params = pass.params;
  if (pass.recompute == Recompute::kAll) project(pass, x, c);
  if (pass.again != nullptr) activate(pass, c);
  const Mat<T> gate = c.gate_up.col_range(0, spec_.size), up = c.gate_up.col_range(spec_.size, spec_.size);
  const Mat<T> dact = new_matrix<T>(pass.exec.arena, dy.rows, spec_.size);
  pass.exec.linear_backward(dy, c.act, params.weight(down_, spec_.hidden, spec_.size), dact, params.grad_matrix(down_, spec_.hidden, spec_.size), nullptr,
                            Write::kOverwrite);
  pass.exec.swiglu_backward(dact, gate, up, gate, up);
  pass.exec.linear_backward(c.gate_up, x, params.weight(gate_up_, 2 * spec_.size, spec_.hidden), dx, params.grad_matrix(gate_up_, 2 * spec_.size, spec_.hidden),
                            nullptr, Write::kOverwrite);
}

template class Mlp<float>;
template class Mlp<double>;
template class Mlp<Bf16>;

}  // namespace fw
