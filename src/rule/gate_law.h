// The law that makes a gate's value of its logit x, with the slopes for backward (recurrence.md 2.1). With y = x + b, b
// of dt_bias, and a = exp(a_log):
//     sigmoid:      factor s(y)             slope factor s (1 - s)
//     softplus:     -a softplus(y)          slope -a s(y),               of a_log the value
//     lower bound:  factor s(a y)           slope factor a s (1 - s),    of a_log slope y
//     logsigmoid:   -factor softplus(-y)    slope factor s(-y)
// scan/cpu/kernels_gates.cpp is the same for vectors. Plain numbers, with the caller's functions for exp, log(1 + x)
// and 1/x (Math).
#pragma once

#include <cmath>

#include "rule/front.h"
#include "rule/gates.h"

namespace fw {

template <class T>
struct GateLaw {
  GateActivation given = GateActivation::kValue;
  T factor = 1;
};
template <class T>
constexpr GateLaw<T> gate_law(const GateSpec& spec) {
  return {spec.given, static_cast<T>(spec.factor)};
}

// s(x) and softplus(x), from one exponential that cannot overflow.
template <class T>
struct Sigmoid {
  T s, softplus;
};
template <class Math, class T>
FW_HOST_DEVICE inline T sigmoid_of(T x) {
  const T e = Math::exp(-std::abs(x)), inverse = Math::inverse(T(1) + e);
  return x < T(0) ? e * inverse : inverse;
}
template <class Math, class T>
FW_HOST_DEVICE inline T softplus_of(T x) {
  return (x > T(0) ? x : T(0)) + Math::log1p(Math::exp(-std::abs(x)));
}
template <class Math, class T>
FW_HOST_DEVICE inline Sigmoid<T> sigmoid_and_softplus(T x) {
  const T e = Math::exp(-std::abs(x)), inverse = Math::inverse(T(1) + e);
  return {x < T(0) ? e * inverse : inverse, (x > T(0) ? x : T(0)) + Math::log1p(e)};
}

template <class Math, class T>
FW_HOST_DEVICE inline T gate_value(const GateLaw<T>& law, T rate, T y) {
  switch (law.given) {
    case GateActivation::kSigmoid:
      return law.factor * sigmoid_of<Math>(y);
    case GateActivation::kSoftplus:
      return -rate * softplus_of<Math>(y);
    case GateActivation::kLowerBound:
      return law.factor * sigmoid_of<Math>(rate * y);
    case GateActivation::kLogSigmoid:
      return -law.factor * softplus_of<Math>(-y);
    default:
      return y;
  }
}

// The value and what it changes by with x (or b) and with a_log.
template <class T>
struct GatePoint {
  T value, slope, of_rate;
};
template <class Math, class T>
FW_HOST_DEVICE inline GatePoint<T> gate_point(const GateLaw<T>& law, T rate, T y) {
  switch (law.given) {
    case GateActivation::kSigmoid: {
      const T s = sigmoid_of<Math>(y), value = law.factor * s;
      return {value, value * (T(1) - s), T(0)};
    }
    case GateActivation::kSoftplus: {
      const Sigmoid<T> at = sigmoid_and_softplus<Math>(y);
      const T value = -rate * at.softplus;
      return {value, -rate * at.s, value};
    }
    case GateActivation::kLowerBound: {
      const T s = sigmoid_of<Math>(rate * y), value = law.factor * s, slope = rate * value * (T(1) - s);
      return {value, slope, slope * y};
    }
    case GateActivation::kLogSigmoid: {
      const Sigmoid<T> at = sigmoid_and_softplus<Math>(-y);
      return {-law.factor * at.softplus, law.factor * at.s, T(0)};
    }
    default:
      return {y, T(1), T(0)};
  }
}

}  // namespace fw
