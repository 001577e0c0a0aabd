// The diagonal preconditioner (recurrence.md section 3), one channel of one token, in plain numbers:
//     A_t = exp(gP) A_{t-1} + betaP khat^2          y = log(A_t + eps) - center          M_t = exp(-log(x) y / (1 + |y|))
// scan/cpu/kernels_precond.cpp is the same for vectors of channels, and its backward.
#pragma once

#include <cmath>

#include "rule/rule.h"

namespace fw {

template <class T>
inline T precond_state(T decay, T gain, T k_hat, T state) {
  return decay * state + gain * k_hat * k_hat;
}

// y: what is squashed.
template <class T>
inline T precond_raw(const Rule& rule, T state, T center) {
  return std::log(state + static_cast<T>(rule.precond_eps)) - center;
}

// M from y: between 1/x and x.
template <class T>
inline T precond_squash(const Rule& rule, T y) {
  return std::exp(-std::log(static_cast<T>(rule.precond_x)) * y / (T(1) + std::abs(y)));
}

}  // namespace fw
