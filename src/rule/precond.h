// The diagonal preconditioner (recurrence.md section 3), a channel of a token:
//     A_t = exp(gP) A_{t-1} + betaP khat^2          y = log(A + eps) - center          M = exp(-log(x) (a y / (1 + |y|) + b))
// with a, b by the range (a = 1, b = 0; the one-sided ones a = 1/2, b = +-1/2), or tanh(y) for y / (1 + |y|), or
// M = 1 / (A + ridge). A is that of this token, or of the one before it (PrecondForm::kInversePrevious). M of A is
// elementwise.def's, in the arithmetic of whoever asks.
#pragma once

#include <cmath>

#include "rule/axes.h"
#include "rule/front.h"

namespace fw {

template <class T>
FW_HOST_DEVICE inline T precond_state(T decay, T gain, T k_hat, T state) {
  return decay * state + gain * k_hat * k_hat;
}

// M as a function of A with the rule's numbers worked out once, for one head: squashed, M = B^(slope s + shift)
// with s = y / (1 + |y|) or tanh(y). V: a number, or a vector with the same number for every channel.
template <class V>
struct PrecondMap {
  bool squashed = true;
  bool previous = false;  // of the A before the token
  bool tanh = false;      // s = tanh(y)
  V eps{}, center{}, slope{}, shift{}, ridge{};
};

// log_x: of the rule's precond_x to the base B.
template <class T>
FW_HOST_DEVICE inline PrecondMap<T> precond_map(const Rule& rule, T log_x, T center) {
  PrecondMap<T> map;
  map.squashed = rule.precond_squashed();
  map.previous = rule.precond_form == PrecondForm::kInversePrevious;
  map.tanh = rule.precond_form == PrecondForm::kTanh;
  map.eps = static_cast<T>(rule.precond_eps);
  map.center = center;
  map.slope = rule.precond_form == PrecondForm::kSquash || map.tanh ? -log_x : -T(0.5) * log_x;
  map.shift = rule.precond_form == PrecondForm::kSquashLow    ? -T(0.5) * log_x
              : rule.precond_form == PrecondForm::kSquashHigh ? T(0.5) * log_x
                                                              : T(0);
  map.ridge = static_cast<T>(rule.precond_ridge);
  return map;
}

#define FW_ELEMENT FW_HOST_DEVICE inline
#define FW_ELEMENTS_OF_THE_PRECONDITIONER
#include "rule/elementwise.def"
#undef FW_ELEMENTS_OF_THE_PRECONDITIONER
#undef FW_ELEMENT

}  // namespace fw
