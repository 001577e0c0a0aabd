// front: the part of a rule that is its own. Everything a rule does to one token of one head is linear in q, k, v with
// five coefficients (recurrence.md section 2):
//     r = r_q q          e = b (.) (e_k k + e_q q)          w = M (.) w_k k          z = c (.) z_v v
// with b, c the channel gates (1 if tied) and M the preconditioner (1 if none; on r instead of w for Precond::kRead). This file has the coefficients as
// functions of |q|^2, |k|^2 and the scalar gates, and their vector-Jacobian product: the only place where gains and norms are written. The elementwise rest is
// the same for every rule (scan/cpu/kernels_front.cpp; device code will use this file too).
//
// A new gain: one case in gain_pair, one in front_coefs_vjp, a value of the enum, a reference.
#pragma once

#include <cmath>

#include "rule/rule.h"

#if defined(__CUDACC__)
#define FW_HOST_DEVICE __host__ __device__
#else
#define FW_HOST_DEVICE
#endif

namespace fw {

template <class T>
struct FrontCoefs {
  T r_q = 0, e_k = 0, e_q = 0, w_k = 0, z_v = 0;
};

// What the coefficients depend on: |q|^2 and |k|^2 of the raw vectors, the scalar gates (1 and 0 where a rule has none).
template <class T>
struct FrontScalars {
  T q2 = 0, k2 = 0, beta = 1, lambda = 0;
};

// x / sqrt(|x|^2 + eps); a zero vector with eps = 0 stays zero.
template <class T>
FW_HOST_DEVICE inline T inverse_norm(T x2, T eps) {
  return x2 + eps > T(0) ? T(1) / std::sqrt(x2 + eps) : T(0);
}

template <class T>
FW_HOST_DEVICE inline T q_factor(const Rule& rule, T q2) {
  return rule.q_norm == Norm::kL2 ? inverse_norm(q2, static_cast<T>(rule.norm_eps)) : T(1);
}

template <class T>
FW_HOST_DEVICE inline T k_factor(const Rule& rule, T k2) {
  return rule.k_norm == Norm::kL2 ? inverse_norm(k2, static_cast<T>(rule.norm_eps)) : T(1);
}

// (1 - exp(-x)) / x and its derivative, x >= 0. The closed form of the derivative cancels for small x; its series is
// sum over n >= 1 of (-1)^n n x^(n-1) / (n+1)!.
template <class T>
FW_HOST_DEVICE inline T efla_factor(T x) {
  return x > T(0) ? -std::expm1(-x) / x : T(1);
}
template <class T>
FW_HOST_DEVICE inline T efla_factor_derivative(T x) {
  if (x > T(0.5)) return (std::exp(-x) * (T(1) + x) - T(1)) / (x * x);
  T sum = 0, power = T(-0.5);  // (-1)^n x^(n-1) / (n+1)!
  for (int n = 1; n <= 14; ++n) {
    sum += static_cast<T>(n) * power;
    power *= -x / static_cast<T>(n + 2);
  }
  return sum;
}

// The gain s as the pair (rho, s rho). Streams are invariant under e, z times rho and w over rho; Kaczmarz and
// NLMS (its eta = 1) use rho = sqrt(|k|^2 + eps), so that no coefficient exceeds eta / sqrt(eps) however small the key is
// (eta / eps otherwise). The other gains are at most beta.
template <class T>
struct GainPair {
  T rho = 1, s_rho = 1;
};

template <class T>
FW_HOST_DEVICE inline GainPair<T> gain_pair(const Rule& rule, T k2_hat, T beta) {
  switch (rule.gain) {
    case Gain::kOne:
      return {T(1), T(1)};
    case Gain::kGate:
      return {T(1), beta};
    case Gain::kLonghorn:
      return {T(1), beta / (T(1) + beta * k2_hat)};
    case Gain::kEfla:
      return {T(1), beta * efla_factor(beta * k2_hat)};
    case Gain::kNlms:
    case Gain::kKaczmarz: {
      const T inverse = inverse_norm(k2_hat, static_cast<T>(rule.gain_eps));
      return inverse > T(0) ? GainPair<T>{T(1) / inverse, beta * inverse} : GainPair<T>{T(1), T(0)};
    }
  }
  return {};
}

template <class T>
FW_HOST_DEVICE inline FrontCoefs<T> front_coefs(const Rule& rule, T scale, const FrontScalars<T>& x) {
  const T qn = q_factor(rule, x.q2);
  const T kn = k_factor(rule, x.k2);
  const GainPair<T> gain = gain_pair(rule, x.k2 * kn * kn, x.beta);
  const T ce = rule.erase == Gate::kTied ? gain.s_rho : gain.rho;
  FrontCoefs<T> c;
  c.r_q = scale * qn;
  c.e_k = ce * kn;
  c.e_q = ce * x.lambda * qn;
  c.w_k = kn / gain.rho;
  c.z_v = rule.write == Gate::kTied ? gain.s_rho : gain.rho;
  return c;
}

// From the gradients of the coefficients to those of the scalars.
template <class T>
FW_HOST_DEVICE inline FrontScalars<T> front_coefs_vjp(const Rule& rule, T scale, const FrontScalars<T>& x, const FrontCoefs<T>& d) {
  const T qn = q_factor(rule, x.q2);
  const T kn = k_factor(rule, x.k2);
  const T k2_hat = x.k2 * kn * kn;
  const GainPair<T> gain = gain_pair(rule, k2_hat, x.beta);
  const T ce = rule.erase == Gate::kTied ? gain.s_rho : gain.rho;

  FrontScalars<T> dx;
  dx.beta = 0;
  const T dce = d.e_k * kn + d.e_q * x.lambda * qn;
  dx.lambda = d.e_q * ce * qn;
  const T dqn = d.r_q * scale + d.e_q * ce * x.lambda;
  T dkn = d.e_k * ce + d.w_k / gain.rho;
  T ds_rho = 0;
  T drho = -d.w_k * kn / (gain.rho * gain.rho);
  (rule.erase == Gate::kTied ? ds_rho : drho) += dce;
  (rule.write == Gate::kTied ? ds_rho : drho) += d.z_v;

  T dk2_hat = 0;
  switch (rule.gain) {
    case Gain::kOne:
      break;
    case Gain::kGate:
      dx.beta = ds_rho;
      break;
    case Gain::kLonghorn: {
      const T inverse = T(1) / (T(1) + x.beta * k2_hat);
      dx.beta = ds_rho * inverse * inverse;
      dk2_hat = -dx.beta * x.beta * x.beta;
      break;
    }
    case Gain::kEfla:
      dx.beta = ds_rho * std::exp(-x.beta * k2_hat);
      dk2_hat = ds_rho * x.beta * x.beta * efla_factor_derivative(x.beta * k2_hat);
      break;
    case Gain::kNlms:
    case Gain::kKaczmarz:
      if (k2_hat + static_cast<T>(rule.gain_eps) > T(0)) {
        dx.beta = ds_rho / gain.rho;
        drho -= ds_rho * x.beta / (gain.rho * gain.rho);
        dk2_hat = drho / (T(2) * gain.rho);
      }
      break;
  }
  if (rule.k_norm == Norm::kL2) {
    dkn += dk2_hat * T(2) * x.k2 * kn;
    dx.k2 = dk2_hat * kn * kn - T(0.5) * kn * kn * kn * dkn;
  } else {
    dx.k2 = dk2_hat;
  }
  dx.q2 = rule.q_norm == Norm::kL2 ? -T(0.5) * qn * qn * qn * dqn : T(0);
  return dx;
}

}  // namespace fw
