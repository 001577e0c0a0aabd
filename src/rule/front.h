// front: the part of a rule that is its own. Everything a rule does to one token of one head is linear in q, k, v (and
// the erase key p, where it is not k) with seven coefficients (recurrence.md section 2):
//     r = M_r (.) (r_q q + r_k k)     e = b (.) (e_k k + e_q q + e_p p)     w = M_w (.) w_k k     z = c (.) z_v v
//     f = f of the tensor / rho (erase_write_factor()), along which an erase takes away where it is not w
// b, c are the channel gates (1 if there are none), and M is the preconditioner, on w or on r (1 where it is not). This
// file has the coefficients as functions of the norms, the scalar gates and k.(M k), and their vector-Jacobian product.
// It is the only place where gains, norms and normalisers are written. The elementwise rest is the same for every rule:
// elementwise.def, on rows in scan/cpu/kernels_front.cpp and scan/cuda/common/front/rows.cuh.
//
// A new step size: docs/internals/add-step-size.md has its files.
#pragma once

#include <cmath>

#include "rule/axes.h"
#include "rule/token_scalars.h"

namespace fw {

// Plain numbers as the arithmetic of elementwise.def; powers of e.
template <class T>
struct PlainMath {
  static constexpr bool kHasTanh = true;
  FW_HOST_DEVICE static T mul_add(T a, T b, T c) { return a * b + c; }
  FW_HOST_DEVICE static T quotient(T a, T b) { return a / b; }
  FW_HOST_DEVICE static T inverse(T a) { return T(1) / a; }
  FW_HOST_DEVICE static T one_plus_abs(T a) { return T(1) + std::abs(a); }
  FW_HOST_DEVICE static T log(T a) { return std::log(a); }
  FW_HOST_DEVICE static T power(T a) { return std::exp(a); }
  FW_HOST_DEVICE static T tanh(T a) { return std::tanh(a); }
};

#define FW_ELEMENT FW_HOST_DEVICE inline
#define FW_ELEMENTS_OF_THE_FRONT
#include "rule/elementwise.def"
#undef FW_ELEMENTS_OF_THE_FRONT
#undef FW_ELEMENT

template <class T>
struct FrontCoefs {
  T r_q = 0, r_k = 0, e_k = 0, e_q = 0, e_p = 0, w_k = 0, z_v = 0;
};

// What the coefficients depend on: |q|^2, |k|^2, |p|^2 and k.(M k) of the raw vectors, and the scalar gates (their
// neutral values where a rule has none). The numbers of tokens.def: beta, lambda, read_correction (d of the corrected
// read) ...; erase and write: gates of one value a head, or the means of channel gates; alpha_p, beta_p: the
// preconditioner's gates.
template <class T>
struct FrontScalars {
  T q2 = 0, k2 = 0, p2 = 0, kmk = 0;
#define FW_TOKEN_SCALAR(name, neutral, used) T name = neutral;
#include "rule/tokens.def"
  T erase = 1, write = 1, alpha_p = 1, beta_p = 1;
};

// The scalars that a token's tensors hold: load(tensor) of those that the rule takes, or the rule's own number. `from`
// has them by their names in tokens.def; precond_gates: whether the preconditioner's are there to be read. What is left
// are squares of vectors and means of gates.
FW_CALLS_EITHER
template <Numbers kWhich = Numbers::kAll, class T, class Load, class From>
FW_HOST_DEVICE inline void load_gates(const Rule& r, bool precond_gates, FrontScalars<T>& s, Load&& load,
                                      const From& from) {
  if (r.feedback == Feedback::kFixed) s.lambda = static_cast<T>(r.lambda);
#define FW_TOKEN_SCALAR(name, neutral, used)                                 \
  if constexpr (scalars_detail::taken<kWhich>(scalars_detail::Name::name)) { \
    if (used) s.name = load(from.name);                                      \
  }
#include "rule/tokens.def"
  if (r.uses_erase_gate() && r.erase == Gate::kScalar) s.erase = load(from.erase_gate);
  if (r.write == Gate::kScalar) s.write = load(from.write_gate);
  if (r.normaliser == Normaliser::kGated && precond_gates) {
    s.alpha_p = std::exp(load(from.precond_g));
    s.beta_p = load(from.precond_beta);
  }
}

// a / b. On a device to about two units in the last place, with denormals as 0, for b below 2^126: the exact one is a
// call there, and around a call nothing stays in registers.
template <class T>
FW_HOST_DEVICE inline T quotient(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) {
    float q;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
  }
#endif
  return a / b;
}

// x / sqrt(|x|^2 + eps); a zero vector with eps = 0 stays zero.
template <class T>
FW_HOST_DEVICE inline T inverse_norm(T x2, T eps) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(float)) return x2 + eps > T(0) ? rsqrtf(x2 + eps) : T(0);
#endif
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
  return x > T(0) ? quotient(-std::expm1(-x), x) : T(1);
}
template <class T>
FW_HOST_DEVICE inline T efla_factor_derivative(T x) {
  if (x > T(0.5)) return quotient(std::exp(-x) * (T(1) + x) - T(1), x * x);
  T sum = 0, power = T(-0.5);  // (-1)^n x^(n-1) / (n+1)!
  for (int n = 1; n <= 14; ++n) {
    sum += static_cast<T>(n) * power;
    power *= quotient(-x, static_cast<T>(n + 2));
  }
  return sum;
}

// The gain s as the pair (rho, s rho). Streams are invariant under e, z times rho and w over rho. Kaczmarz and NLMS
// (its eta = 1) use rho = sqrt(|k|^2 + eps), so that no coefficient exceeds eta / sqrt(eps) however small the key is
// (eta / eps otherwise). The other gains are at most beta. kmk_hat: k.(M k) of
// the normalised key.
template <class T>
struct GainPair {
  T rho = 1, s_rho = 1;
};

template <class T>
FW_HOST_DEVICE inline GainPair<T> gain_pair(const Rule& rule, T k2_hat, T kmk_hat, T beta) {
  switch (rule.gain) {
    case Gain::kOne:
      return {T(1), T(1)};
    case Gain::kGate:
      return {T(1), beta};
    case Gain::kLonghorn:
      return {T(1), quotient(beta, T(1) + beta * k2_hat)};
    case Gain::kPrecondLonghorn:
      return {T(1), quotient(beta, T(1) + beta * kmk_hat)};
    case Gain::kEfla:
      return {T(1), beta * efla_factor(beta * k2_hat)};
    case Gain::kNlms:
    case Gain::kKaczmarz: {
      const T inverse = inverse_norm(k2_hat, static_cast<T>(rule.gain_eps));
      return inverse > T(0) ? GainPair<T>{quotient(T(1), inverse), beta * inverse} : GainPair<T>{T(1), T(0)};
    }
  }
  return {};
}

// The factor on M: a function of c = k.(M k) of the normalised key and the preconditioner's gates.
template <class T>
FW_HOST_DEVICE inline T normaliser(const Rule& rule, T c, T alpha, T beta) {
  switch (rule.normaliser) {
    case Normaliser::kNone:
      return T(1);
    case Normaliser::kKey:
      return c > T(0) ? quotient(T(1), c) : T(0);
    case Normaliser::kOnePlus:
      return quotient(T(1), T(1) + c);
    case Normaliser::kGated: {
      const T sum = alpha + beta * c;
      return sum > T(0) ? quotient(beta, sum) : T(0);
    }
  }
  return T(1);
}

template <class T>
struct NormaliserSlopes {
  T c = 0, alpha = 0, beta = 0;
};
template <class T>
FW_HOST_DEVICE inline NormaliserSlopes<T> normaliser_slopes(const Rule& rule, T c, T alpha, T beta) {
  const T n = normaliser(rule, c, alpha, beta);
  switch (rule.normaliser) {
    case Normaliser::kNone:
      return {};
    case Normaliser::kKey:
    case Normaliser::kOnePlus:
      return {-n * n, T(0), T(0)};
    case Normaliser::kGated: {
      const T sum = alpha + beta * c;
      return sum > T(0) ? NormaliserSlopes<T>{-n * n, quotient(-n, sum), quotient(alpha, sum * sum)}
                        : NormaliserSlopes<T>{};
    }
  }
  return {};
}

// What e, z and the read share, made once for the coefficients and their gradients.
template <class T>
struct FrontFactors {
  T qn, kn, pn;  // of the normalisations
  GainPair<T> gain;
  T ce, cz;    // what multiplies the erase key and the value
  T n_w, n_r;  // the normaliser, where M acts
};

template <class T>
FW_HOST_DEVICE inline FrontFactors<T> front_factors(const Rule& rule, const FrontScalars<T>& x) {
  FrontFactors<T> f;
  f.qn = q_factor(rule, x.q2);
  f.kn = k_factor(rule, x.k2);
  f.pn = rule.erase_key == EraseKey::kOwn ? k_factor(rule, x.p2) : T(1);
  f.gain = gain_pair(rule, x.k2 * f.kn * f.kn, x.kmk * f.kn * f.kn, x.beta);
  f.ce = rule.erase == Gate::kTied ? f.gain.s_rho : f.gain.rho * x.erase;
  f.cz = rule.write == Gate::kTied ? f.gain.s_rho : f.gain.rho * x.write;
  const T n = normaliser(rule, x.kmk * f.kn * f.kn, x.alpha_p, x.beta_p);
  f.n_w = rule.preconditions_read() ? T(1) : n;
  f.n_r = rule.preconditions_read() ? n : T(1);
  return f;
}

template <class T>
FW_HOST_DEVICE inline FrontCoefs<T> front_coefs(const Rule& rule, T scale, const FrontScalars<T>& x) {
  const FrontFactors<T> f = front_factors(rule, x);
  const bool own_key = rule.erase_key == EraseKey::kOwn;
  FrontCoefs<T> c;
  c.r_q = scale * f.n_r * f.qn;
  c.r_k = -scale * f.n_r * x.read_correction * f.kn;
  c.e_k = own_key ? T(0) : f.ce * f.kn;
  c.e_p = own_key ? f.ce * f.pn : T(0);
  c.e_q = f.ce * x.lambda * f.qn;
  c.w_k = quotient(f.n_w * f.kn, f.gain.rho);
  c.z_v = f.cz;
  return c;
}

// From the gradient of a factor 1 / sqrt(|x|^2 + eps) to that of |x|^2.
template <class T>
FW_HOST_DEVICE inline T inverse_norm_slope(Norm norm, T factor) {
  return norm == Norm::kL2 ? -T(0.5) * factor * factor * factor : T(0);
}

// The factor on an erase-write vector of its own: e comes times rho.
template <class T>
FW_HOST_DEVICE inline T erase_write_factor(const Rule& rule, const FrontScalars<T>& x) {
  return quotient(T(1), front_factors(rule, x).gain.rho);
}

// From the gradients of the coefficients to those of the scalars. d_f: that of erase_write_factor().
template <class T>
FW_HOST_DEVICE inline FrontScalars<T> front_coefs_vjp(const Rule& rule, T scale, const FrontScalars<T>& x,
                                                      const FrontCoefs<T>& d, T d_f = 0) {
  const FrontFactors<T> f = front_factors(rule, x);
  const T k2_hat = x.k2 * f.kn * f.kn;
  const bool own_key = rule.erase_key == EraseKey::kOwn;

  FrontScalars<T> dx;
  dx.beta = 0;
  const T dce = (own_key ? d.e_p * f.pn : d.e_k * f.kn) + d.e_q * x.lambda * f.qn;
  dx.lambda = d.e_q * f.ce * f.qn;
  dx.read_correction = -d.r_k * scale * f.n_r * f.kn;
  const T dqn = d.r_q * scale * f.n_r + d.e_q * f.ce * x.lambda;
  const T dpn = own_key ? d.e_p * f.ce : T(0);
  T dkn =
      (own_key ? T(0) : d.e_k * f.ce) + quotient(d.w_k * f.n_w, f.gain.rho) - d.r_k * scale * f.n_r * x.read_correction;
  T ds_rho = 0;
  T drho = quotient(-d.w_k * f.n_w * f.kn, f.gain.rho * f.gain.rho);
  if (rule.erase_write == EraseWrite::kOwn) drho -= quotient(d_f, f.gain.rho * f.gain.rho);
  dx.erase = dx.write = 0;
  if (rule.erase == Gate::kTied) {
    ds_rho += dce;
  } else {
    drho += dce * x.erase;
    dx.erase = dce * f.gain.rho;
  }
  if (rule.write == Gate::kTied) {
    ds_rho += d.z_v;
  } else {
    drho += d.z_v * x.write;
    dx.write = d.z_v * f.gain.rho;
  }

  // The normaliser, through k.(M k) kn^2 and the preconditioner's gates.
  const T dn = rule.preconditions_read() ? scale * (d.r_q * f.qn - d.r_k * x.read_correction * f.kn)
                                         : quotient(d.w_k * f.kn, f.gain.rho);
  const NormaliserSlopes<T> slopes = normaliser_slopes(rule, x.kmk * f.kn * f.kn, x.alpha_p, x.beta_p);
  dx.alpha_p = dn * slopes.alpha;
  dx.beta_p = dn * slopes.beta;
  T dkmk_hat = dn * slopes.c;

  T dk2_hat = 0;
  switch (rule.gain) {
    case Gain::kOne:
      break;
    case Gain::kGate:
      dx.beta = ds_rho;
      break;
    case Gain::kLonghorn: {
      const T inverse = quotient(T(1), T(1) + x.beta * k2_hat);
      dx.beta = ds_rho * inverse * inverse;
      dk2_hat = -dx.beta * x.beta * x.beta;
      break;
    }
    case Gain::kPrecondLonghorn: {
      const T inverse = quotient(T(1), T(1) + x.beta * x.kmk * f.kn * f.kn);
      dx.beta = ds_rho * inverse * inverse;
      dkmk_hat -= dx.beta * x.beta * x.beta;
      break;
    }
    case Gain::kEfla:
      dx.beta = ds_rho * std::exp(-x.beta * k2_hat);
      dk2_hat = ds_rho * x.beta * x.beta * efla_factor_derivative(x.beta * k2_hat);
      break;
    case Gain::kNlms:
    case Gain::kKaczmarz:
      if (k2_hat + static_cast<T>(rule.gain_eps) > T(0)) {
        dx.beta = quotient(ds_rho, f.gain.rho);
        drho -= quotient(ds_rho * x.beta, f.gain.rho * f.gain.rho);
        dk2_hat = quotient(drho, T(2) * f.gain.rho);
      }
      break;
  }
  dx.kmk = dkmk_hat * f.kn * f.kn;
  dkn += dkmk_hat * T(2) * x.kmk * f.kn;
  if (rule.k_norm == Norm::kL2) {
    dkn += dk2_hat * T(2) * x.k2 * f.kn;
    dx.k2 = dk2_hat * f.kn * f.kn + inverse_norm_slope(rule.k_norm, f.kn) * dkn;
  } else {
    dx.k2 = dk2_hat;
  }
  dx.q2 = inverse_norm_slope(rule.q_norm, f.qn) * dqn;
  dx.p2 = inverse_norm_slope(rule.k_norm, f.pn) * dpn;
  return dx;
}

}  // namespace fw
