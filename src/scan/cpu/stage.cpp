#include "scan/cpu/stage.h"

#include <algorithm>

namespace fw::cpu {
template <class T>
Stage<T>::Stage(const Plan& plan, bool backward, Bump<T>& bump) : plan_(plan) {
  if (!plan.bf16_io && !plan.f16_io) return;
  const auto specs = token_specs(plan.rule);
  // The preconditioner's pass has all rows.
  const int64_t rows = backward || plan.rule.uses_precond() ? plan.longest : std::min(plan.chunk, plan.longest);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (!specs[i].used) continue;
    const int64_t row = specs[i].channels(plan.K, plan.V);
    inputs_[i] = bump.take(rows * row);
    if (backward) grads_[i] = bump.take(rows * row);
  }
  o_ = bump.take(rows * plan.V);
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
void Stage<T>::widen(const TokenTensor<T>& tensor, const TokenTensor<T>& copy, int64_t n, int64_t hv, int64_t begin,
                     int64_t rows) const {
  const int64_t first = tensor.offset(plan_, n, begin, per_value_head(tensor) ? hv : hv / plan_.group());
  for (int64_t t = 0; t < rows; ++t)
    tensor.widen(first + t * tensor.stride_t, tensor.dim, copy.data + copy.offset(plan_, n, begin + t, 0));
}

template <class T>
void Stage<T>::round(const TokenTensor<T>& copy, const TokenTensor<T>& tensor, int64_t n, int64_t hv, int64_t begin,
                     int64_t rows, int64_t column0, int64_t columns) const {
  const int64_t first = tensor.offset(plan_, n, begin, per_value_head(tensor) ? hv : hv / plan_.group()) + column0;
  for (int64_t t = 0; t < rows; ++t)
    tensor.round(first + t * tensor.stride_t, columns, copy.data + copy.offset(plan_, n, begin + t, 0) + column0);
}

template <class T>
Inputs<T> Stage<T>::read(const Inputs<T>& in, int64_t n, int64_t hv, bool key_heads) {
  const Inputs<T> x = open_inputs(in);
  for (const auto token : kInputTokens<T>) {
    const TokenTensor<T>& tensor = in.*token;
    if (tensor.narrow() && (key_heads || per_value_head(tensor))) widen(tensor, x.*token, n, hv, 0, plan_.length(n));
  }
  return x;
}

template <class T>
Outputs<T> Stage<T>::read(const Outputs<T>& d, int64_t n, int64_t hv) {
  Outputs<T> x = open(d);
  if (d.o.narrow()) widen(d.o, x.o, n, hv, 0, plan_.length(n));
  return x;
}

template <class T>
Outputs<T> Stage<T>::open(const Outputs<T>& out) const {
  Outputs<T> x = out;
  if (out.o.narrow()) x.o = copy_of(out.o, o_);
  return x;
}

template <class T>
Inputs<T> Stage<T>::open_inputs(const Inputs<T>& in) const {
  Inputs<T> x = in;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<T>& tensor = in.*kInputTokens<T>[i];
    if (tensor.narrow()) x.*kInputTokens<T>[i] = copy_of(tensor, inputs_[i]);
  }
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
    if ((grads.*kInputTokens<T>[i]).narrow())
      widen(grads.*kInputTokens<T>[i], x.*kInputTokens<T>[i], n, hv, 0, plan_.length(n));
  }
  return x;
}

template <class T>
void Stage<T>::close(const Inputs<T>& grads, const Inputs<T>& staged, int64_t n, int64_t hv, bool key_heads) const {
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<T>& tensor = grads.*kInputTokens<T>[i];
    if (tensor.narrow() && (key_heads || per_value_head(tensor)))
      round(staged.*kInputTokens<T>[i], tensor, n, hv, 0, plan_.length(n), 0, tensor.dim);
  }
}

template <class T>
StagedChunks<T>::StagedChunks(const Stage<T>& stage, const Inputs<T>& in, const Outputs<T>& out, int64_t n, int64_t hv,
                              int64_t column0, int64_t columns)
    : stage_(stage),
      caller_in_(in),
      caller_out_(out),
      n_(n),
      hv_(hv),
      column0_(column0),
      columns_(columns),
      in_(stage.open_inputs(in)),
      out_(stage.open(out)) {}

template <class T>
void StagedChunks<T>::load(int64_t begin, int64_t rows) {
  for (const auto token : kInputTokens<T>) {
    const TokenTensor<T>& tensor = caller_in_.*token;
    if (!tensor.narrow()) continue;
    (in_.*token).staged_first = begin;
    stage_.widen(tensor, in_.*token, n_, hv_, begin, rows);
  }
  out_.o.staged_first = begin;
}

template <class T>
void StagedChunks<T>::store(int64_t begin, int64_t rows) {
  if (caller_out_.o.narrow()) stage_.round(out_.o, caller_out_.o, n_, hv_, begin, rows, column0_, columns_);
}

template class Stage<float>;
template class Stage<double>;
template class StagedChunks<float>;
template class StagedChunks<double>;

}  // namespace fw::cpu
