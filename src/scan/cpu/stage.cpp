#include "scan/cpu/stage.h"

#include <type_traits>

#include "base/bf16.h"

namespace fw::cpu {
namespace {

template <class T>
constexpr TokenTensor<T> Inputs<T>::*kTensors[] = {
    &Inputs<T>::q,         &Inputs<T>::k,           &Inputs<T>::v,          &Inputs<T>::g,          &Inputs<T>::beta,
    &Inputs<T>::lambda,    &Inputs<T>::erase_key,   &Inputs<T>::erase_gate, &Inputs<T>::write_gate, &Inputs<T>::read_correction,
    &Inputs<T>::precond_g, &Inputs<T>::precond_beta};

// Values a row of the tensor has, in the order of kTensors; 0: the rule does not take it.
std::array<int64_t, 12> widths(const Plan& plan) {
  const Rule& r = plan.rule;
  const auto gate = [](bool used, Gate kind, int64_t dim) { return used ? (kind == Gate::kScalar ? 1 : dim) : 0; };
  return {plan.K,
          plan.K,
          plan.V,
          r.uses_g() ? (r.decay == Decay::kChannel ? plan.K : 1) : 0,
          r.uses_beta(),
          r.uses_lambda(),
          r.uses_erase_key() ? plan.K : 0,
          gate(r.uses_erase_gate(), r.erase, plan.K),
          gate(r.uses_write_gate(), r.write, plan.V),
          r.uses_read_correction(),
          r.uses_precond(),
          r.uses_precond()};
}

}  // namespace

template <class T>
Stage<T>::Stage(const Plan& plan, bool backward, Bump<T>& bump) : plan_(plan) {
  if (!plan.bf16_io) return;
  const std::array<int64_t, kInputs> width = widths(plan);
  for (size_t i = 0; i < kInputs; ++i) {
    if (width[i] == 0) continue;
    inputs_[i] = bump.take(plan.longest * width[i]);
    if (backward) grads_[i] = bump.take(plan.longest * width[i]);
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
  if constexpr (std::is_same_v<T, float>) {
    const Bf16* rows = tensor.bf16 + tensor.offset(plan_, n, 0, per_value_head(tensor) ? hv : hv / plan_.group());
    for (int64_t t = 0; t < plan_.length(n); ++t) widen_bf16(tensor.dim, rows + t * tensor.stride_t, copy.data + t * copy.stride_t);
  }
}

template <class T>
void Stage<T>::round(const TokenTensor<T>& copy, const TokenTensor<T>& tensor, int64_t n, int64_t hv, int64_t column0, int64_t columns) const {
  if constexpr (std::is_same_v<T, float>) {
    Bf16* rows = tensor.bf16 + tensor.offset(plan_, n, 0, per_value_head(tensor) ? hv : hv / plan_.group()) + column0;
    for (int64_t t = 0; t < plan_.length(n); ++t) round_to_bf16(columns, copy.data + t * copy.stride_t + column0, rows + t * tensor.stride_t);
  }
}

template <class T>
Inputs<T> Stage<T>::read(const Inputs<T>& in, int64_t n, int64_t hv, bool key_heads) {
  Inputs<T> x = in;
  for (size_t i = 0; i < kInputs; ++i) {
    const TokenTensor<T>& tensor = in.*kTensors<T>[i];
    if (tensor.bf16 == nullptr) continue;
    x.*kTensors<T>[i] = copy_of(tensor, inputs_[i]);
    if (key_heads || per_value_head(tensor)) widen(tensor, x.*kTensors<T>[i], n, hv);
  }
  return x;
}

template <class T>
Outputs<T> Stage<T>::read(const Outputs<T>& d, int64_t n, int64_t hv) {
  Outputs<T> x = open(d);
  if (d.o.bf16 != nullptr) widen(d.o, x.o, n, hv);
  return x;
}

template <class T>
Outputs<T> Stage<T>::open(const Outputs<T>& out) {
  Outputs<T> x = out;
  if (out.o.bf16 != nullptr) x.o = copy_of(out.o, o_);
  return x;
}

template <class T>
Inputs<T> Stage<T>::open(const Inputs<T>& grads) {
  Inputs<T> x = grads;
  for (size_t i = 0; i < kInputs; ++i) {
    if ((grads.*kTensors<T>[i]).bf16 != nullptr) x.*kTensors<T>[i] = copy_of(grads.*kTensors<T>[i], grads_[i]);
  }
  return x;
}

template <class T>
Inputs<T> Stage<T>::open_to_add(const Inputs<T>& grads, int64_t n, int64_t hv) {
  Inputs<T> x = open(grads);
  for (size_t i = 0; i < kInputs; ++i) {
    if ((grads.*kTensors<T>[i]).bf16 != nullptr) widen(grads.*kTensors<T>[i], x.*kTensors<T>[i], n, hv);
  }
  return x;
}

template <class T>
void Stage<T>::close(const Outputs<T>& out, const Outputs<T>& staged, int64_t n, int64_t hv, int64_t column0, int64_t columns) const {
  if (out.o.bf16 != nullptr) round(staged.o, out.o, n, hv, column0, columns);
}

template <class T>
void Stage<T>::close(const Inputs<T>& grads, const Inputs<T>& staged, int64_t n, int64_t hv, bool key_heads) const {
  for (size_t i = 0; i < kInputs; ++i) {
    const TokenTensor<T>& tensor = grads.*kTensors<T>[i];
    if (tensor.bf16 != nullptr && (key_heads || per_value_head(tensor))) round(staged.*kTensors<T>[i], tensor, n, hv, 0, tensor.dim);
  }
}

template class Stage<float>;
template class Stage<double>;

}  // namespace fw::cpu
