#include "scan/cpu/stage.h"

namespace fw::cpu {
template <class T>
Stage<T>::Stage(const Plan& plan, bool backward, Bump<T>& bump) : plan_(plan) {
  if (!plan.bf16_io && !plan.f16_io) return;
  const auto specs = token_specs(plan.rule);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (!specs[i].used) continue;
    const int64_t row = specs[i].channels(plan.K, plan.V);
    inputs_[i] = bump.take(plan.longest * row);
    if (backward) grads_[i] = bump.take(plan.longest * row);
  }
  o_ = bump.take(plan.longest * plan.V);
}

template <class T>
TokenTensor<T> Stage<T>::copy_of(const TokenTensor<T>& tensor, T* slot) const {
  TokenTensor<T> copy;
  copy.data = slot;
  copy.heads = tensor.heads;
  copy.dim = tensor.dim;
  copy.stride_t = tensor.dim;
  copy.staged = true;
  return copy;
}

template <class T>
void Stage<T>::widen(const TokenTensor<T>& tensor, const TokenTensor<T>& copy, int64_t n, int64_t hv) const {
  const int64_t first = tensor.offset(plan_, n, 0, per_value_head(tensor) ? hv : hv / plan_.group());
  for (int64_t t = 0; t < plan_.length(n); ++t)
    tensor.widen(first + t * tensor.stride_t, tensor.dim, copy.data + t * copy.stride_t);
}

template <class T>
void Stage<T>::round(const TokenTensor<T>& copy, const TokenTensor<T>& tensor, int64_t n, int64_t hv, int64_t column0,
                     int64_t columns) const {
  const int64_t first = tensor.offset(plan_, n, 0, per_value_head(tensor) ? hv : hv / plan_.group()) + column0;
  for (int64_t t = 0; t < plan_.length(n); ++t)
    tensor.round(first + t * tensor.stride_t, columns, copy.data + t * copy.stride_t + column0);
}

template <class T>
Inputs<T> Stage<T>::read(const Inputs<T>& in, int64_t n, int64_t hv, bool key_heads) {
  Inputs<T> x = in;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<T>& tensor = in.*kInputTokens<T>[i];
    if (!tensor.narrow()) continue;
    x.*kInputTokens<T>[i] = copy_of(tensor, inputs_[i]);
    if (key_heads || per_value_head(tensor)) widen(tensor, x.*kInputTokens<T>[i], n, hv);
  }
  return x;
}

template <class T>
Outputs<T> Stage<T>::read(const Outputs<T>& d, int64_t n, int64_t hv) {
  Outputs<T> x = open(d);
  if (d.o.narrow()) widen(d.o, x.o, n, hv);
  return x;
}

template <class T>
Outputs<T> Stage<T>::open(const Outputs<T>& out) {
  Outputs<T> x = out;
  if (out.o.narrow()) x.o = copy_of(out.o, o_);
  return x;
}

template <class T>
Inputs<T> Stage<T>::open(const Inputs<T>& grads) {
  Inputs<T> x = grads;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if ((grads.*kInputTokens<T>[i]).narrow()) x.*kInputTokens<T>[i] = copy_of(grads.*kInputTokens<T>[i], grads_[i]);
  }
  return x;
}

template <class T>
Inputs<T> Stage<T>::open_to_add(const Inputs<T>& grads, int64_t n, int64_t hv) {
  Inputs<T> x = open(grads);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if ((grads.*kInputTokens<T>[i]).narrow()) widen(grads.*kInputTokens<T>[i], x.*kInputTokens<T>[i], n, hv);
  }
  return x;
}

template <class T>
void Stage<T>::close(const Outputs<T>& out, const Outputs<T>& staged, int64_t n, int64_t hv, int64_t column0,
                     int64_t columns) const {
  if (out.o.narrow()) round(staged.o, out.o, n, hv, column0, columns);
}

template <class T>
void Stage<T>::close(const Inputs<T>& grads, const Inputs<T>& staged, int64_t n, int64_t hv, bool key_heads) const {
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<T>& tensor = grads.*kInputTokens<T>[i];
    if (tensor.narrow() && (key_heads || per_value_head(tensor)))
      round(staged.*kInputTokens<T>[i], tensor, n, hv, 0, tensor.dim);
  }
}

template class Stage<float>;
template class Stage<double>;

}  // namespace fw::cpu
