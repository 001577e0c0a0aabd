// The diagonal preconditioner (recurrence.md section 3), one channel of one token, in plain numbers:
//     A_t = exp(gP) A_{t-1} + betaP khat^2          y = log(A + eps) - center          M = exp(-log(x) (a y / (1 + |y|) + b))
// with a, b by the range (a = 1, b = 0; the one-sided ones a = 1/2, b = +-1/2), or M = 1 / (A + ridge). A is that of this
// token, or of the one before it (PrecondForm::kInversePrevious). scan/cpu/kernels_precond.cpp is the same for vectors of
// channels, and its backward. Device code uses PrecondMap, with functions of its own for 2^x, log and 1/x (Math).
#pragma once

#include <cmath>
#include <numbers>

#include "rule/axes.h"
#include "rule/front.h"

namespace fw {

template <class T>
FW_HOST_DEVICE inline T precond_state(T decay, T gain, T k_hat, T state) {
  return decay * state + gain * k_hat * k_hat;
}

// y: what is squashed. Squashing forms only.
template <class T>
FW_HOST_DEVICE inline T precond_raw(const Rule& rule, T state, T center) {
  return std::log(state + static_cast<T>(rule.precond_eps)) - center;
}

// M from y: between 1/x and x, or one half of that range. Squashing forms only.
template <class T>
FW_HOST_DEVICE inline T precond_squash(const Rule& rule, T y) {
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
FW_HOST_DEVICE inline T precond_inverse(const Rule& rule, T state) {
  return T(1) / (state + static_cast<T>(rule.precond_ridge));
}

// M as a function of A with the rule's numbers worked out once, for one head, and its slopes: squashed, M = 2^(slope y / (1 + |y|) + shift).
template <class T>
struct PrecondMap {
  bool squashed = true;
  bool previous = false;  // of the A before the token
  T eps = 0, center = 0, slope = 0, shift = 0, ridge = 0;
};

template <class T>
FW_HOST_DEVICE inline PrecondMap<T> precond_map(const Rule& rule, T center) {
  const T log_x = std::log2(static_cast<T>(rule.precond_x));
  PrecondMap<T> map;
  map.squashed = rule.precond_squashed();
  map.previous = rule.precond_form == PrecondForm::kInversePrevious;
  map.eps = static_cast<T>(rule.precond_eps);
  map.center = center;
  map.slope = rule.precond_form == PrecondForm::kSquash ? -log_x : -T(0.5) * log_x;
  map.shift = rule.precond_form == PrecondForm::kSquashLow ? -T(0.5) * log_x : rule.precond_form == PrecondForm::kSquashHigh ? T(0.5) * log_x : T(0);
  map.ridge = static_cast<T>(rule.precond_ridge);
  return map;
}

// Squashed: y of A + eps, and M of y / (1 + |y|).
template <class Math, class T>
FW_HOST_DEVICE inline T squash_argument(const PrecondMap<T>& map, T shifted) {
  return Math::log(shifted) - map.center;
}
template <class Math, class T>
FW_HOST_DEVICE inline T squash_value(const PrecondMap<T>& map, T squashed) {
  return Math::exp2(map.slope * squashed + map.shift);
}

template <class Math, class T>
FW_HOST_DEVICE inline T precond_value(const PrecondMap<T>& map, T a) {
  if (!map.squashed) return Math::inverse(a + map.ridge);
  const T y = squash_argument<Math>(map, a + map.eps);
  return squash_value<Math>(map, y * Math::inverse(T(1) + std::abs(y)));
}

// M and its slopes with respect to A and to minus the center.
template <class T>
struct PrecondPoint {
  T m = 0, of_state = 0, of_raw = 0;
};
template <class Math, class T>
FW_HOST_DEVICE inline PrecondPoint<T> precond_point(const PrecondMap<T>& map, T a) {
  PrecondPoint<T> p;
  if (!map.squashed) {
    p.m = Math::inverse(a + map.ridge);
    p.of_state = -p.m * p.m;
    return p;
  }
  const T shifted = a + map.eps, y = squash_argument<Math>(map, shifted), wide = T(1) + std::abs(y), inverse = Math::inverse(shifted * wide),
          narrow = inverse * shifted;
  p.m = squash_value<Math>(map, y * narrow);
  p.of_raw = p.m * (map.slope * T(std::numbers::ln2)) * (narrow * narrow);
  p.of_state = p.of_raw * (inverse * wide);
  return p;
}

// dm times the slope of M with respect to A; dcenter is reduced by what reaches the center.
template <class Math, class T>
FW_HOST_DEVICE inline T precond_gradient(const PrecondMap<T>& map, T a, T dm, T& dcenter) {
  const PrecondPoint<T> p = precond_point<Math>(map, a);
  dcenter -= dm * p.of_raw;
  return dm * p.of_state;
}

}  // namespace fw
