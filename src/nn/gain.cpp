#include "nn/gain.h"

#include "nn/activations.h"

namespace fw {

template <class T>
Mat<T> GainGate<T>::forward(const Pass<T>& pass, Mat<T> sigmoid, int64_t tokens, Context& context) const {
  const Exec<T>& exec = pass.exec;
  context.sigmoid = sigmoid;
  if (spec_.learned) {
    context.sigmoid = new_matrix<T>(exec.arena, tokens, v_heads_);
    exec.learned_gate_forward(pass.params.value(parameter_), bound_, context.sigmoid);
  }
  if (spec_.factor == PositionFactor::kNone) return context.sigmoid;
  const Mat<T> beta = new_matrix<T>(exec.arena, tokens, v_heads_);
  exec.position_factor(context.sigmoid, spec_.factor, pass.layout, beta);
  return beta;
}

template <class T>
void GainGate<T>::log_decay(const Pass<T>& pass, const Context& context, Mat<Wide<T>> g) const {
  pass.exec.single_gate_decay_forward(context.sigmoid, g);
}

template <class T>
void GainGate<T>::backward(const Pass<T>& pass, const Context& context, Mat<T> dbeta, Mat<const Wide<T>> dg) const {
  const Exec<T>& exec = pass.exec;
  if (spec_.factor != PositionFactor::kNone) exec.position_factor(dbeta, spec_.factor, pass.layout, dbeta);
  exec.sigmoid_gate_backward(dbeta, context.sigmoid, bound_, dbeta, nullptr);
  if (dg.data != nullptr) exec.single_gate_decay_backward(dg, context.sigmoid, dbeta);
  if (spec_.learned) exec.head_constant_backward(dbeta, v_heads_, pass.params.grad(parameter_));
}

template class GainGate<float>;
template class GainGate<double>;
template class GainGate<Bf16>;

}  // namespace fw
