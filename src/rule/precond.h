// The diagonal preconditioner (recurrence.md section 3), one channel of one token, in plain numbers:
//     A_t = exp(gP) A_{t-1} + betaP khat^2          y = log(A + eps) - center          M = exp(-log(x) (a y / (1 + |y|) + b))
// with a, b by the range (a = 1, b = 0; the one-sided ones a = 1/2, b = +-1/2), or M = 1 / (A + ridge). A is that of this
// token, or of the one before it (PrecondForm::kInversePrevious). scan/cpu/kernels_precond.cpp is the same for vectors of
// channels, and its backward.
#pragma once

#include <cmath>

#include "rule/axes.h"

namespace fw {

template <class T>
inline T precond_state(T decay, T gain, T k_hat, T state) {
  return decay * state + gain * k_hat * k_hat;
}

// y: what is squashed. Squashing forms only.
template <class T>
inline T precond_raw(const Rule& rule, T state, T center) {
  return std::log(state + static_cast<T>(rule.precond_eps)) - center;
}

// M from y: between 1/x and x, or one half of that range. Squashing forms only.
template <class T>
inline T precond_squash(const Rule& rule, T y) {
  const T s = y / (T(1) + std::abs(y)), log_x = std::log(static_cast<T>(rule.precond_x));
  switch (rule.precond_form) {
    case PrecondForm::kSquashLow:
      return std::exp(-log_x * (s + T(1)) / T(2));
    case PrecondForm::kSquashHigh:
      return std::exp(-log_x * (s - T(1)) / T(2));
    default:
      return std::exp(-log_x * s);
  }
}

// M of the other forms.
template <class T>
inline T precond_inverse(const Rule& rule, T state) {
  return T(1) / (state + static_cast<T>(rule.precond_ridge));
}

}  // namespace fw
