// One sequence and key head at a time. First q and k are normalised and the preconditioner runs (what the value heads
// of the group share). Then each value head builds the streams r w e z and runs the recurrence. The backward does the
// same with all states kept, then sweeps back. Formulas are recurrence.md's, in its letters.
#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference/fields.h"
#include "reference/gates.h"

namespace fw {
namespace {

using Vec = std::vector<double>;

Vec zeros(int64_t n) { return Vec(static_cast<size_t>(n), 0.0); }

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Where one value head finds its data. `row` counts tokens of the whole batch.
struct Head {
  int64_t n, hk, h;  // sequence, key head, value head
  int64_t begin, T;  // the sequence's tokens
};

struct Problem {
  const Rule& rule;
  const ReferenceShape& s;
  const ReferenceInputs& in;

  int64_t group() const { return s.HV / s.H; }
  double scale() const { return s.scale != 0 ? s.scale : 1.0 / std::sqrt(static_cast<double>(s.K)); }
  int64_t key_at(int64_t row, int64_t hk) const { return (row * s.H + hk) * s.K; }
  int64_t value_at(int64_t row, int64_t h) const { return (row * s.HV + h) * s.V; }
  int64_t scalar_at(int64_t row, int64_t h) const { return row * s.HV + h; }
  int64_t key_scalar_at(int64_t row, int64_t hk) const { return row * s.H + hk; }
  // A channel tensor with H or HV heads.
  int64_t channel_at(int64_t row, int64_t heads, const Head& head) const {
    const int64_t count = heads_or_key_heads(heads, s);
    return (row * count + (count == s.HV ? head.h : head.hk)) * s.K;
  }
};

// x / sqrt(|x|^2 + eps), or x itself.
void normalise(Norm norm, double eps, const double* x, int64_t n, double* y) {
  double factor = 1;
  if (norm == Norm::kL2) {
    const double square = dot(x, x, n) + eps;
    factor = square > 0 ? 1.0 / std::sqrt(square) : 0.0;
  }
  for (int64_t i = 0; i < n; ++i) y[i] = factor * x[i];
}

// dx += (d y / d x)^T dy
void normalise_backward(Norm norm, double eps, const double* x, const double* dy, int64_t n, double* dx) {
  if (norm == Norm::kRaw) {
    for (int64_t i = 0; i < n; ++i) dx[i] += dy[i];
    return;
  }
  const double square = dot(x, x, n) + eps;
  if (square <= 0) return;
  const double factor = 1.0 / std::sqrt(square);
  const double along = factor * factor * factor * dot(x, dy, n);
  for (int64_t i = 0; i < n; ++i) dx[i] += factor * dy[i] - along * x[i];
}

// What the value heads of a key head share. M is 1 and A empty without preconditioner.
struct KeyHead {
  Vec q, k, p;  // [T, K], normalised; p: the erase key, k if it has none of its own
  Vec A;        // [T + 1, K], A_0 first
  Vec M;        // [T, K]
};

struct KeyHeadGradient {
  Vec dq, dk, dp, dM;  // [T, K]
};

// M of one channel, from its state before and after the token.
double preconditioner(const Rule& rule, double center, double before, double after) {
  const double r = std::log(after + rule.precond_eps) - center;
  const double s = r / (1 + std::abs(r));
  switch (rule.precond_form) {
    case PrecondForm::kSquash:
      return std::pow(rule.precond_x, -s);
    case PrecondForm::kTanh:
      return std::pow(rule.precond_x, -std::tanh(r));
    case PrecondForm::kSquashLow:
      return std::pow(rule.precond_x, -(1 + s) / 2);
    case PrecondForm::kSquashHigh:
      return std::pow(rule.precond_x, (1 - s) / 2);
    case PrecondForm::kInverse:
      return 1 / (after + rule.precond_ridge);
    case PrecondForm::kInversePrevious:
      return 1 / (before + rule.precond_ridge);
  }
  return 1;
}

struct PreconditionerGradient {
  double center, before, after;
};

PreconditionerGradient preconditioner_gradient(const Rule& rule, double center, double before, double after) {
  const double M = preconditioner(rule, center, before, after);
  if (rule.precond_form == PrecondForm::kInverse) return {0, 0, -M * M};
  if (rule.precond_form == PrecondForm::kInversePrevious) return {0, -M * M, 0};
  const double r = std::log(after + rule.precond_eps) - center;
  // how far the exponent goes for s from -1 to 1
  const bool symmetric = rule.precond_form == PrecondForm::kSquash || rule.precond_form == PrecondForm::kTanh;
  const double width = symmetric ? 1 : 0.5;
  const double slope = rule.precond_form == PrecondForm::kTanh ? 1 / (std::cosh(r) * std::cosh(r))
                                                               : 1 / ((1 + std::abs(r)) * (1 + std::abs(r)));
  const double dr = -width * std::log(rule.precond_x) * M * slope;
  return {-dr, 0, dr / (after + rule.precond_eps)};
}

// k of one token and key head before its norm: the tensor, or 1 - exp(g).
Vec raw_key(const Problem& p, int64_t at) {
  Vec k(static_cast<size_t>(p.s.K));
  for (int64_t i = 0; i < p.s.K; ++i)
    k[i] = p.rule.key_source == KeySource::kDecay ? -std::expm1(p.in.g[at + i]) : p.in.k[at + i];
  return k;
}

KeyHead key_head(const Problem& p, const Head& head) {
  const int64_t K = p.s.K;
  KeyHead x{zeros(head.T * K), zeros(head.T * K), zeros(head.T * K), {}, Vec(static_cast<size_t>(head.T * K), 1.0)};
  for (int64_t t = 0; t < head.T; ++t) {
    const int64_t at = p.key_at(head.begin + t, head.hk);
    normalise(p.rule.q_norm, p.rule.norm_eps, &p.in.q[at], K, &x.q[t * K]);
    const Vec k = raw_key(p, at);
    normalise(p.rule.k_norm, p.rule.norm_eps, k.data(), K, &x.k[t * K]);
    normalise(p.rule.k_norm, p.rule.norm_eps, p.rule.uses_erase_key() ? &p.in.erase_key[at] : k.data(), K, &x.p[t * K]);
  }
  if (!p.rule.uses_precond()) return x;

  x.A = zeros((head.T + 1) * K);
  if (!p.in.initial_precond.empty()) std::copy_n(&p.in.initial_precond[(head.n * p.s.H + head.hk) * K], K, x.A.data());
  const double center = p.rule.uses_precond_center() ? p.in.precond_center[head.hk] : 0;
  for (int64_t t = 0; t < head.T; ++t) {
    const int64_t gate = p.key_scalar_at(head.begin + t, head.hk);
    for (int64_t i = 0; i < K; ++i) {
      const double k = x.k[t * K + i];
      const double A = std::exp(p.in.precond_g[gate]) * x.A[t * K + i] + p.in.precond_beta[gate] * k * k;
      x.M[t * K + i] = preconditioner(p.rule, center, x.A[t * K + i], A);
      x.A[(t + 1) * K + i] = A;
    }
  }
  return x;
}

// Accumulates into the gradients of q, k, the preconditioner's inputs and its initial state.
void key_head_backward(const Problem& p, const Head& head, const KeyHead& x, KeyHeadGradient& dx,
                       const ReferenceOutputs& d, ReferenceInputs& grad) {
  const int64_t K = p.s.K;
  if (p.rule.uses_precond()) {
    const double center = p.rule.uses_precond_center() ? p.in.precond_center[head.hk] : 0;
    Vec dA = zeros(K);
    const int64_t state = (head.n * p.s.H + head.hk) * K;
    if (!d.final_precond.empty()) std::copy_n(&d.final_precond[state], K, dA.data());
    for (int64_t t = head.T - 1; t >= 0; --t) {
      const int64_t gate = p.key_scalar_at(head.begin + t, head.hk);
      const double decay = std::exp(p.in.precond_g[gate]);
      for (int64_t i = 0; i < K; ++i) {
        const double k = x.k[t * K + i], before = x.A[t * K + i], dM = dx.dM[t * K + i];
        const PreconditionerGradient slope = preconditioner_gradient(p.rule, center, before, x.A[(t + 1) * K + i]);
        if (p.rule.uses_precond_center()) grad.precond_center[head.hk] += dM * slope.center;
        dA[i] += dM * slope.after;
        grad.precond_beta[gate] += dA[i] * k * k;
        grad.precond_g[gate] += dA[i] * decay * before;
        dx.dk[t * K + i] += 2 * dA[i] * p.in.precond_beta[gate] * k;
        dA[i] = dA[i] * decay + dM * slope.before;
      }
    }
    if (!grad.initial_precond.empty()) std::copy_n(dA.data(), K, &grad.initial_precond[state]);
  }
  for (int64_t t = 0; t < head.T; ++t) {
    const int64_t at = p.key_at(head.begin + t, head.hk);
    normalise_backward(p.rule.q_norm, p.rule.norm_eps, &p.in.q[at], &dx.dq[t * K], K, &grad.q[at]);
    const Vec k = raw_key(p, at);
    Vec dk = zeros(K);
    normalise_backward(p.rule.k_norm, p.rule.norm_eps, k.data(), &dx.dk[t * K], K, dk.data());
    if (p.rule.uses_erase_key()) {
      normalise_backward(p.rule.k_norm, p.rule.norm_eps, &p.in.erase_key[at], &dx.dp[t * K], K, &grad.erase_key[at]);
    } else {
      normalise_backward(p.rule.k_norm, p.rule.norm_eps, k.data(), &dx.dp[t * K], K, dk.data());
    }
    for (int64_t i = 0; i < K; ++i) {
      if (p.rule.key_source == KeySource::kDecay) {
        grad.g[at + i] -= std::exp(p.in.g[at + i]) * dk[i];
      } else {
        grad.k[at + i] += dk[i];
      }
    }
  }
}

// The canonical streams of one value head (or their gradients; then alpha holds the gradient of the log-decay).
struct Streams {
  Vec r, w, e;  // [T, K]
  Vec f;        // [T, K], what the erase takes away along; w where the rule has none of its own
  Vec z;        // [T, V]
  Vec alpha;    // [T, K], exp(g)

  Streams(int64_t T, int64_t K, int64_t V)
      : r(zeros(T * K)), w(zeros(T * K)), e(zeros(T * K)), f(zeros(T * K)), z(zeros(T * V)), alpha(zeros(T * K)) {}
};

// k.(M k) of the normalised key, M without its normaliser.
double key_form(const KeyHead& x, int64_t t, int64_t K) {
  double c = 0;
  for (int64_t i = 0; i < K; ++i) c += x.k[t * K + i] * x.M[t * K + i] * x.k[t * K + i];
  return c;
}

// The scalar gain of a token.
double gain(const Problem& p, const Head& head, const KeyHead& x, int64_t t) {
  const double* k = &x.k[t * p.s.K];
  const double beta = p.rule.uses_beta() ? p.in.beta[p.scalar_at(head.begin + t, head.h)] : 1;
  const double square = dot(k, k, p.s.K);
  switch (p.rule.gain) {
    case Gain::kOne:
    case Gain::kGate:
      return beta;
    case Gain::kNlms:
    case Gain::kKaczmarz:
      return square + p.rule.gain_eps > 0 ? beta / (square + p.rule.gain_eps) : 0;
    case Gain::kLonghorn:
      return beta / (1 + beta * square);
    case Gain::kPrecondLonghorn:
      return beta / (1 + beta * key_form(x, t, p.s.K));
    case Gain::kEfla:
      return square > 0 ? (1 - std::exp(-beta * square)) / square : beta;
  }
  return 1;
}

struct GainGradient {
  double beta, square;  // with respect to beta and |k|^2
  double form = 0;      // and k.(M k)
};

GainGradient gain_gradient(const Problem& p, const Head& head, const KeyHead& x, int64_t t) {
  const double* k = &x.k[t * p.s.K];
  const double beta = p.rule.uses_beta() ? p.in.beta[p.scalar_at(head.begin + t, head.h)] : 1;
  const double square = dot(k, k, p.s.K);
  switch (p.rule.gain) {
    case Gain::kOne:
    case Gain::kGate:
      return {1, 0};
    case Gain::kNlms:
    case Gain::kKaczmarz: {
      const double shifted = square + p.rule.gain_eps;
      return shifted > 0 ? GainGradient{1 / shifted, -beta / (shifted * shifted)} : GainGradient{0, 0};
    }
    case Gain::kLonghorn: {
      const double factor = 1 / (1 + beta * square);
      return {factor * factor, -beta * beta * factor * factor};
    }
    case Gain::kPrecondLonghorn: {
      const double factor = 1 / (1 + beta * key_form(x, t, p.s.K));
      return {factor * factor, 0, -beta * beta * factor * factor};
    }
    case Gain::kEfla:
      if (square <= 0) return {1, -beta * beta / 2};
      return {std::exp(-beta * square),
              (beta * square * std::exp(-beta * square) - 1 + std::exp(-beta * square)) / (square * square)};
  }
  return {0, 0};
}

double log_decay(const Problem& p, const Head& head, int64_t t, int64_t channel) {
  const int64_t row = head.begin + t;
  switch (p.rule.decay) {
    case Decay::kNone:
      return 0;
    case Decay::kConstant:
      return std::log(1 - std::exp2(-5 - static_cast<double>(head.h)));
    case Decay::kScalar:
      return p.in.g[p.scalar_at(row, head.h)];
    case Decay::kChannel:
      return p.in.g[p.channel_at(row, p.s.g_heads, head) + channel];
  }
  return 0;
}

// The gates of one token of one head, whatever the rule takes them from.
struct TokenGates {
  double s = 1, lambda = 0, d = 0;
  Vec b, c;      // of the erase key [K] and the value [V]
  double n = 1;  // the normaliser
  double alpha_p = 1, beta_p = 1;
};

double mean_of(const double* x, int64_t n) { return std::accumulate(x, x + n, 0.0) / static_cast<double>(n); }

// A gate over `dim` channels: a value each, their mean, one value of the head, or the gain.
Vec gate(Gate kind, bool used, double s, const Vec& values, int64_t channels_at, int64_t scalar_at, int64_t dim) {
  Vec y(static_cast<size_t>(dim), s);
  if (!used) return y;
  if (kind == Gate::kChannel) std::copy_n(&values[channels_at], dim, y.data());
  if (kind == Gate::kAveraged) std::fill(y.begin(), y.end(), mean_of(&values[channels_at], dim));
  if (kind == Gate::kScalar) std::fill(y.begin(), y.end(), values[scalar_at]);
  return y;
}

// From the gradient of a gate's channels to that of the values it came from; what reaches the gain is added to ds.
void gate_backward(Gate kind, bool used, const Vec& dy, Vec& grad, int64_t channels_at, int64_t scalar_at, double& ds) {
  const int64_t dim = static_cast<int64_t>(dy.size());
  const double sum = std::accumulate(dy.begin(), dy.end(), 0.0);
  if (!used) {
    ds += sum;
  } else if (kind == Gate::kScalar) {
    grad[scalar_at] += sum;
  } else {
    for (int64_t i = 0; i < dim; ++i)
      grad[channels_at + i] += kind == Gate::kChannel ? dy[i] : sum / static_cast<double>(dim);
  }
}

double normaliser(const Rule& rule, double c, double alpha, double beta) {
  switch (rule.normaliser) {
    case Normaliser::kNone:
      return 1;
    case Normaliser::kKey:
      return c > 0 ? 1 / c : 0;
    case Normaliser::kOnePlus:
      return 1 / (1 + c);
    case Normaliser::kGated:
      return alpha + beta * c > 0 ? beta / (alpha + beta * c) : 0;
  }
  return 1;
}

int64_t erase_at(const Problem& p, const Head& head, int64_t row) { return p.channel_at(row, p.s.erase_heads, head); }

TokenGates token_gates(const Problem& p, const Head& head, const KeyHead& x, int64_t t) {
  const int64_t row = head.begin + t, K = p.s.K;
  TokenGates y;
  if (p.rule.uses_gain()) y.s = gain(p, head, x, t);
  if (p.rule.is_delta() && p.rule.feedback == Feedback::kFixed) y.lambda = p.rule.lambda;
  if (p.rule.uses_lambda()) y.lambda = p.in.lambda[p.scalar_at(row, head.h)];
  if (p.rule.uses_read_correction()) y.d = p.in.read_correction[p.scalar_at(row, head.h)];
  y.b = gate(p.rule.erase, p.rule.uses_erase_gate(), y.s, p.in.erase_gate, erase_at(p, head, row),
             p.scalar_at(row, head.h), K);
  y.c = gate(p.rule.write, p.rule.uses_write_gate(), y.s, p.in.write_gate, p.value_at(row, head.h),
             p.scalar_at(row, head.h), p.s.V);
  if (p.rule.uses_precond()) {
    y.alpha_p = std::exp(p.in.precond_g[p.key_scalar_at(row, head.hk)]);
    y.beta_p = p.in.precond_beta[p.key_scalar_at(row, head.hk)];
  }
  y.n = normaliser(p.rule, key_form(x, t, K), y.alpha_p, y.beta_p);
  return y;
}

Streams streams(const Problem& p, const Head& head, const KeyHead& x) {
  const int64_t K = p.s.K, V = p.s.V;
  Streams y(head.T, K, V);
  for (int64_t t = 0; t < head.T; ++t) {
    const double* q = &x.q[t * K];
    const double* k = &x.k[t * K];
    const TokenGates gates = token_gates(p, head, x, t);
    for (int64_t i = 0; i < K; ++i) {
      y.alpha[t * K + i] = std::exp(log_decay(p, head, t, i));
      const double M = gates.n * x.M[t * K + i];
      y.r[t * K + i] = p.scale() * (p.rule.preconditions_read() ? M : 1) * (q[i] - gates.d * k[i]);
      y.w[t * K + i] = (p.rule.preconditions_read() ? 1 : M) * k[i];
      y.e[t * K + i] = p.rule.is_delta() ? gates.b[i] * (x.p[t * K + i] + gates.lambda * q[i]) : 0;
      y.f[t * K + i] =
          p.rule.uses_erase_write() ? p.in.erase_write[p.key_at(head.begin + t, head.hk) + i] : y.w[t * K + i];
    }
    for (int64_t j = 0; j < V; ++j) y.z[t * V + j] = gates.c[j] * p.in.v[p.value_at(head.begin + t, head.h) + j];
  }
  return y;
}

// The normaliser's own gradient: into M, k and the preconditioner's gates.
void normaliser_backward(const Problem& p, const Head& head, const KeyHead& x, int64_t t, const TokenGates& gates,
                         double dn, KeyHeadGradient& dx, ReferenceInputs& grad) {
  if (p.rule.normaliser == Normaliser::kNone) return;
  const int64_t K = p.s.K;
  const double* k = &x.k[t * K];
  double dc = -dn * gates.n * gates.n;  // 1/c, 1/(1 + c) and beta/(alpha + beta c) alike
  if (p.rule.normaliser == Normaliser::kGated && p.rule.uses_precond()) {
    if (gates.n == 0) dc = 0;
    const double sum = gates.alpha_p + gates.beta_p * key_form(x, t, K);
    const int64_t at = p.key_scalar_at(head.begin + t, head.hk);
    if (sum > 0) {
      grad.precond_g[at] -= dn * gates.beta_p / (sum * sum) * gates.alpha_p;
      grad.precond_beta[at] += dn * gates.alpha_p / (sum * sum);
    }
  }
  for (int64_t i = 0; i < K; ++i) {
    dx.dM[t * K + i] += dc * k[i] * k[i];
    dx.dk[t * K + i] += 2 * dc * x.M[t * K + i] * k[i];
  }
}

// From the gradients of the streams to those of the inputs (added) and of what the key head shares (added).
void streams_backward(const Problem& p, const Head& head, const KeyHead& x, const Streams& dy, KeyHeadGradient& dx,
                      ReferenceInputs& grad) {
  const int64_t K = p.s.K, V = p.s.V;
  for (int64_t t = 0; t < head.T; ++t) {
    const int64_t row = head.begin + t;
    const double* q = &x.q[t * K];
    const double* k = &x.k[t * K];
    const TokenGates gates = token_gates(p, head, x, t);
    Vec db(static_cast<size_t>(K)), dc(static_cast<size_t>(V));
    double ds = 0, dlambda = 0, dd = 0, dn = 0;
    for (int64_t i = 0; i < K; ++i) {
      const int64_t at = t * K + i;
      if (p.rule.decay == Decay::kScalar) grad.g[p.scalar_at(row, head.h)] += dy.alpha[at];
      if (p.rule.decay == Decay::kChannel) grad.g[p.channel_at(row, p.s.g_heads, head) + i] += dy.alpha[at];
      const double tied = p.rule.uses_erase_write() ? 0 : dy.f[at];
      const double M = x.M[at], dr = p.scale() * dy.r[at], dw = dy.w[at] + tied, read = q[i] - gates.d * k[i];
      const double M_r = p.rule.preconditions_read() ? gates.n * M : 1,
                   M_w = p.rule.preconditions_read() ? 1 : gates.n * M;
      const double dMn = p.rule.preconditions_read() ? read * dr : k[i] * dw;  // of the product n M
      dx.dM[at] += gates.n * dMn;
      dn += M * dMn;
      dx.dq[at] += M_r * dr;
      dx.dk[at] += M_w * dw - gates.d * M_r * dr;
      dd -= k[i] * M_r * dr;
      if (!p.rule.is_delta()) continue;
      if (p.rule.uses_erase_write()) grad.erase_write[p.key_at(row, head.hk) + i] += dy.f[at];
      const double de = dy.e[at];
      db[i] = de * (x.p[at] + gates.lambda * q[i]);
      dx.dp[at] += gates.b[i] * de;
      dx.dq[at] += gates.b[i] * gates.lambda * de;
      dlambda += gates.b[i] * de * q[i];
    }
    for (int64_t j = 0; j < V; ++j) {
      const int64_t at = p.value_at(row, head.h) + j;
      dc[j] = dy.z[t * V + j] * p.in.v[at];
      grad.v[at] += dy.z[t * V + j] * gates.c[j];
    }
    if (p.rule.is_delta())
      gate_backward(p.rule.erase, p.rule.uses_erase_gate(), db, grad.erase_gate, erase_at(p, head, row),
                    p.scalar_at(row, head.h), ds);
    gate_backward(p.rule.write, p.rule.uses_write_gate(), dc, grad.write_gate, p.value_at(row, head.h),
                  p.scalar_at(row, head.h), ds);
    normaliser_backward(p, head, x, t, gates, dn, dx, grad);
    if (p.rule.uses_lambda()) grad.lambda[p.scalar_at(row, head.h)] += dlambda;
    if (p.rule.uses_read_correction()) grad.read_correction[p.scalar_at(row, head.h)] += dd;
    if (!p.rule.uses_gain()) continue;
    const GainGradient slope = gain_gradient(p, head, x, t);
    if (p.rule.uses_beta()) grad.beta[p.scalar_at(row, head.h)] += ds * slope.beta;
    for (int64_t i = 0; i < K; ++i) {
      dx.dk[t * K + i] += ds * 2 * k[i] * (slope.square + slope.form * x.M[t * K + i]);
      dx.dM[t * K + i] += ds * slope.form * k[i] * k[i];
    }
  }
}

Vec initial_state(const Problem& p, const Head& head) {
  Vec S = zeros(p.s.K * p.s.V);
  if (!p.in.initial_state.empty())
    std::copy_n(&p.in.initial_state[(head.n * p.s.HV + head.h) * p.s.K * p.s.V], S.size(), S.data());
  return S;
}

// One token: found = S^T e of the state that the rule's erase looks at; S becomes Diag(alpha) S + w z^T - f found^T; o
// = S^T r.
void token_forward(const Rule& rule, const Streams& x, int64_t t, int64_t K, int64_t V, Vec& S, double* found,
                   double* o) {
  const bool before = rule.erase_state == EraseState::kPrevious;
  std::fill_n(found, V, 0.0);
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      double& s = S[i * V + j];
      if (before) found[j] += s * x.e[t * K + i];
      s *= x.alpha[t * K + i];
      if (!before) found[j] += s * x.e[t * K + i];
    }
  }
  std::fill_n(o, V, 0.0);
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      S[i * V + j] += x.w[t * K + i] * x.z[t * V + j] - x.f[t * K + i] * found[j];
      o[j] += S[i * V + j] * x.r[t * K + i];
    }
  }
}

// The adjoint of the recurrence: gradients of the streams, and dS from that of the final state to that of the initial
// one.
Streams recurrence_backward(const Problem& p, const Head& head, const Streams& x, const ReferenceOutputs& d, Vec& dS) {
  const int64_t T = head.T, K = p.s.K, V = p.s.V;
  const bool before = p.rule.erase_state == EraseState::kPrevious;
  std::vector<Vec> S(static_cast<size_t>(T) + 1);  // S[t] is the state before token t
  Vec found = zeros(T * V), o = zeros(V), dfound = zeros(V);
  S[0] = initial_state(p, head);
  for (int64_t t = 0; t < T; ++t) {
    S[t + 1] = S[t];
    token_forward(p.rule, x, t, K, V, S[t + 1], &found[t * V], o.data());
  }
  Streams dx(T, K, V);
  const Vec no_cotangent = zeros(V);
  for (int64_t t = T - 1; t >= 0; --t) {
    const double* dO = d.o.empty() ? no_cotangent.data() : &d.o[p.value_at(head.begin + t, head.h)];
    double* dz = &dx.z[t * V];
    std::fill(dfound.begin(), dfound.end(), 0.0);
    for (int64_t i = 0; i < K; ++i) {
      double* row = &dS[i * V];
      dx.r[t * K + i] = dot(&S[t + 1][i * V], dO, V);
      for (int64_t j = 0; j < V; ++j) {
        row[j] += x.r[t * K + i] * dO[j];
        dz[j] += x.w[t * K + i] * row[j];
        dfound[j] -= x.f[t * K + i] * row[j];
      }
      dx.w[t * K + i] = dot(row, &x.z[t * V], V);
      dx.f[t * K + i] = -dot(row, &found[t * V], V);
    }
    for (int64_t i = 0; i < K; ++i) {  // row becomes the gradient of the state before
      double* row = &dS[i * V];
      const double alpha = x.alpha[t * K + i], e = x.e[t * K + i];
      dx.e[t * K + i] = (before ? 1 : alpha) * dot(&S[t][i * V], dfound.data(), V);
      for (int64_t j = 0; j < V && !before; ++j) row[j] += e * dfound[j];
      dx.alpha[t * K + i] = alpha * dot(&S[t][i * V], row, V);
      for (int64_t j = 0; j < V; ++j) row[j] = alpha * row[j] + (before ? e * dfound[j] : 0);
    }
  }
  return dx;
}

template <class Body>
void for_each_key_head(const ReferenceShape& s, Body&& body) {
  for (int64_t n = 0; n < s.sequences.count(); ++n) {
    for (int64_t hk = 0; hk < s.H; ++hk)
      body(Head{n, hk, hk * (s.HV / s.H), s.sequences.begin(n), s.sequences.length(n)});
  }
}

}  // namespace

ReferenceOutputs reference_forward(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& given) {
  validate(rule);
  validate(s.gates, rule);
  check_inputs(rule, s, given);
  const ReferenceInputs in = gate_values(rule, s, given);
  const Problem p{rule, s, in};
  ReferenceOutputs out;
  for (const auto& field : reference_output_fields()) out.*field.values = zeros(field.count(rule, s));
  for_each_key_head(s, [&](Head head) {
    const KeyHead shared = key_head(p, head);
    if (rule.uses_precond())
      std::copy_n(&shared.A[head.T * s.K], s.K, &out.final_precond[(head.n * s.H + head.hk) * s.K]);
    for (int64_t i = 0; i < p.group(); ++i, ++head.h) {
      const Streams x = streams(p, head, shared);
      Vec S = initial_state(p, head), u = zeros(s.V);
      for (int64_t t = 0; t < head.T; ++t)
        token_forward(rule, x, t, s.K, s.V, S, u.data(), &out.o[p.value_at(head.begin + t, head.h)]);
      std::copy(S.begin(), S.end(), out.final_state.begin() + (head.n * s.HV + head.h) * s.K * s.V);
    }
  });
  return out;
}

ReferenceInputs reference_backward(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& given,
                                   const ReferenceOutputs& d) {
  validate(rule);
  validate(s.gates, rule);
  check_inputs(rule, s, given);
  check_cotangents(rule, s, d);
  const ReferenceInputs in = gate_values(rule, s, given);
  const Problem p{rule, s, in};
  ReferenceInputs grad;
  for (const auto& field : reference_input_fields())
    grad.*field.values = zeros(static_cast<int64_t>((in.*field.values).size()));
  for_each_key_head(s, [&](Head head) {
    const KeyHead shared = key_head(p, head);
    KeyHeadGradient dshared{zeros(head.T * s.K), zeros(head.T * s.K), zeros(head.T * s.K), zeros(head.T * s.K)};
    for (int64_t i = 0; i < p.group(); ++i, ++head.h) {
      const int64_t state = (head.n * s.HV + head.h) * s.K * s.V;
      Vec dS = zeros(s.K * s.V);
      if (!d.final_state.empty()) std::copy_n(&d.final_state[state], dS.size(), dS.data());
      const Streams dx = recurrence_backward(p, head, streams(p, head, shared), d, dS);
      if (!grad.initial_state.empty()) std::copy_n(dS.data(), dS.size(), &grad.initial_state[state]);
      streams_backward(p, head, shared, dx, dshared, grad);
    }
    key_head_backward(p, head, shared, dshared, d, grad);
  });
  gate_gradients(rule, s, given, grad);
  return grad;
}

}  // namespace fw
