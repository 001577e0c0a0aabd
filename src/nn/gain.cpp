#include "nn/gain.h"

#include <algorithm>
#include <cmath>

#include "nn/activations.h"
#include "ops/ops.h"

namespace fw {

template <class T>
T GainGate<T>::factor_of(int64_t place) const {
  const double t = static_cast<double>(place);
  switch (spec_.factor) {
    case GainFactor::kNone:
      return T(1);
    case GainFactor::kInverse:
      return static_cast<T>(1 / t);
    case GainFactor::kInverseSqrt:
      return static_cast<T>(1 / std::sqrt(t));
    case GainFactor::kInverseLog:
      return static_cast<T>(1 / std::log(t + 1));
  }
  return T(1);
}

template <class T>
template <class Body>
void GainGate<T>::for_each_token(const Pass<T>& pass, Body body) const {
  for (int64_t n = 0; n < pass.layout.count(); ++n) {
    const int64_t before = pass.positions != nullptr ? pass.positions[n] : 0;
    for (int64_t i = 0; i < pass.layout.length(n); ++i) body(pass.layout.begin(n) + i, factor_of(before + i + 1));
  }
}

template <class T>
Mat<T> GainGate<T>::forward(const Pass<T>& pass, Mat<T> projection, int64_t tokens, Context& context) const {
  if (spec_.learned) {
    const T value = bound_ / (T(1) + std::exp(-*pass.params.value(parameter_)));
    context.sigmoid = new_matrix<T>(pass.arena, tokens, v_heads_);
    head_constant_forward<T>(&value, v_heads_, context.sigmoid);
  } else {
    context.sigmoid = projection;
    sigmoid_gate_forward<T>(projection, nullptr, bound_, projection);
  }
  if (spec_.factor == GainFactor::kNone) return context.sigmoid;
  const Mat<T> beta = new_matrix<T>(pass.arena, tokens, v_heads_);
  for_each_token(pass, [&](int64_t t, T factor) {
    std::transform(context.sigmoid.row(t), context.sigmoid.row(t) + v_heads_, beta.row(t), [&](T x) { return factor * x; });
  });
  return beta;
}

template <class T>
void GainGate<T>::log_decay(const Context& context, Mat<T> g) const {
  for (int64_t t = 0; t < g.rows; ++t) {
    std::transform(context.sigmoid.row(t), context.sigmoid.row(t) + v_heads_, g.row(t), [](T x) { return std::log1p(-x); });
  }
}

template <class T>
void GainGate<T>::backward(const Pass<T>& pass, const Context& context, Mat<T> dbeta, Mat<const T> dg) const {
  if (spec_.factor != GainFactor::kNone) {
    for_each_token(pass, [&](int64_t t, T factor) {
      for (int64_t h = 0; h < v_heads_; ++h) dbeta.row(t)[h] *= factor;
    });
  }
  sigmoid_gate_backward<T>(dbeta, context.sigmoid, bound_, dbeta, nullptr);
  // g = log(1 - sigmoid(x)) = -softplus(x): its slope is -sigmoid(x), also where 1 - sigmoid(x) has no digits left.
  for (int64_t t = 0; t < dg.rows; ++t) {
    for (int64_t h = 0; h < v_heads_; ++h) dbeta.row(t)[h] -= context.sigmoid.row(t)[h] * dg.row(t)[h];
  }
  if (spec_.learned) head_constant_backward<T>(dbeta, v_heads_, pass.params.grad(parameter_));
}

template class GainGate<float>;
template class GainGate<double>;

}  // namespace fw
