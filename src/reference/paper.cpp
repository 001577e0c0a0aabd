#include "reference/paper.h"

#include <algorithm>
#include <cmath>

#include "reference/fields.h"

namespace fw {
namespace {

using Vector = std::vector<double>;
using Matrix = PaperMatrix;

// Just enough linear algebra for the formulas below to read like the papers.

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t l = 0; l < a.cols; ++l) {
      for (int64_t j = 0; j < b.cols; ++j) c(i, j) += a(i, l) * b(l, j);
    }
  }
  return c;
}

Matrix operator*(double s, Matrix m) {
  for (double& x : m.a) x *= s;
  return m;
}

Matrix operator+(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.a.size(); ++i) a.a[i] += b.a[i];
  return a;
}

Matrix operator-(const Matrix& a, const Matrix& b) { return a + -1.0 * b; }

Vector operator*(const Matrix& m, const Vector& x) {
  Vector y(static_cast<size_t>(m.rows), 0.0);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) y[i] += m(i, j) * x[j];
  }
  return y;
}

Vector operator*(double s, Vector x) {
  for (double& y : x) y *= s;
  return x;
}

Vector operator+(Vector a, const Vector& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

Vector operator-(const Vector& a, const Vector& b) { return a + -1.0 * b; }

Vector hadamard(Vector a, const Vector& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] *= b[i];
  return a;
}

// a b^T
Matrix outer(const Vector& a, const Vector& b) {
  Matrix m(static_cast<int64_t>(a.size()), static_cast<int64_t>(b.size()));
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) m(i, j) = a[i] * b[j];
  }
  return m;
}

Matrix diag(const Vector& d) {
  const int64_t n = static_cast<int64_t>(d.size());
  Matrix m(n, n);
  for (int64_t i = 0; i < n; ++i) m(i, i) = d[i];
  return m;
}

Matrix identity(const Vector& like) { return diag(Vector(like.size(), 1.0)); }

Matrix transpose(const Matrix& m) {
  Matrix t(m.cols, m.rows);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) t(j, i) = m(i, j);
  }
  return t;
}

double square(const Vector& x) {
  double sum = 0;
  for (double y : x) sum += y * y;
  return sum;
}

double dot(const Vector& x, const Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// The normalisation of the keys and queries, eps inside the square root.
Vector l2(const Vector& x) { return 1 / std::sqrt(square(x) + 1e-6) * x; }

// One token of each paper. Numbered formulas are named by what they say, the papers' numbering differs between
// versions.

// Katharopoulos et al. 2020, "Transformers are RNNs": s_i = s_{i-1} + phi(k_i) v_i^T, y_i = phi(q_i)^T s_i, feature map
// and normaliser left to the layer.
Vector linear_attention(PaperState& s, const PaperToken& x) {
  s.S = s.S + outer(x.k, x.v);
  return x.scale * (transpose(s.S) * x.q);
}

// Sun et al. 2023, recurrent form of retention: S_n = gamma S_{n-1} + K_n^T V_n, Q_n S_n; gamma = 1 - 2^(-5-h).
Vector retnet(PaperState& s, const PaperToken& x) {
  const double gamma = 1 - std::pow(2.0, -5.0 - static_cast<double>(x.head));
  s.S = gamma * s.S + outer(x.k, x.v);
  return x.scale * (transpose(s.S) * x.q);
}

// Dao and Gu 2024, the state space dual with scalar a: h_t = a_t h_{t-1} + B_t x_t^T, y_t = C_t^T h_t; B = k, C = q.
Vector mamba2(PaperState& s, const PaperToken& x) {
  s.S = x.alpha * s.S + outer(x.k, x.v);
  return x.scale * (transpose(s.S) * x.q);
}

// Yang et al. 2023: S_t = (alpha_t^T 1) (.) S_{t-1} + k_t^T v_t, o_t = q_t S_t.
Vector gla(PaperState& s, const PaperToken& x) {
  Matrix gate = outer(x.alpha_channel, Vector(x.v.size(), 1.0));
  for (size_t i = 0; i < gate.a.size(); ++i) s.S.a[i] *= gate.a[i];
  s.S = s.S + outer(x.k, x.v);
  return x.scale * (transpose(s.S) * x.q);
}

// Qin et al. 2024, HGRN2: h_t = Diag(f_t) h_{t-1} + (1 - f_t) i_t^T, y_t = h_t^T o_t; the output gate o is q, the input
// i is v.
Vector hgrn2(PaperState& s, const PaperToken& x) {
  Vector input_gate = x.alpha_channel;
  for (double& f : input_gate) f = 1 - f;
  s.S = diag(x.alpha_channel) * s.S + outer(input_gate, x.v);
  return x.scale * (transpose(s.S) * x.q);
}

// Peng et al. 2025, RWKV-7: S_t = S_{t-1} (Diag(w_t) + z_t b_t^T) + v_t k_t^T, y_t = S_t r_t, where w is the decay and
// z what looks the old value up; the erase key is -z.
Vector dplr(PaperState& s, const PaperToken& x) {
  s.S = s.S * (diag(x.alpha_channel) + outer(-1.0 * x.p, x.f)) + outer(x.v, x.k);
  return x.scale * (s.S * x.q);
}

// Schlag et al. 2021 as Yang et al. 2024 write it: retrieve the old value, mix, replace.
// v_old = S k, v_new = beta v + (1 - beta) v_old, S = S - v_old k^T + v_new k^T.
Vector deltanet(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  const Vector v_old = s.S * k;
  const Vector v_new = x.beta * x.v + (1 - x.beta) * v_old;
  s.S = s.S - outer(v_old, k) + outer(v_new, k);
  return x.scale * (s.S * l2(x.q));
}

// Yang et al. 2024: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T.
Vector gated_deltanet(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.S = s.S * (x.alpha * (identity(k) - x.beta * outer(k, k))) + x.beta * outer(x.v, k);
  return x.scale * (s.S * l2(x.q));
}

// Kimi Linear 2025: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t.
Vector kda(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.S = (identity(k) - x.beta * outer(k, k)) * (diag(x.alpha_channel) * s.S) + x.beta * outer(k, x.v);
  return x.scale * (transpose(s.S) * l2(x.q));
}

// Gated DeltaNet-2: S_t = (I - k_t (b_t (.) k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t (.) v_t)^T.
Vector gated_deltanet2(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.S = (identity(k) - outer(k, hadamard(x.b, k))) * (diag(x.alpha_channel) * s.S) + outer(k, hadamard(x.w, x.v));
  return x.scale * (transpose(s.S) * l2(x.q));
}

// Kaczmarz Linear Attention: decay, then one relaxed projection onto S k = v:
// S_t = alpha_t S_{t-1} + eta_t / (|k_t|^2 + eps) (v_t - alpha_t S_{t-1} k_t) k_t^T.
Vector kaczmarz(PaperState& s, const PaperToken& x) {
  const Matrix decayed = x.alpha * s.S;
  const double step = x.beta / (square(x.k) + 1e-6);
  s.S = decayed + step * outer(x.v - decayed * x.k, x.k);
  return x.scale * (s.S * l2(x.q));
}

// Q-Delta: the retrieval key is k + lambda q:
// S_t = alpha_t S_{t-1} - beta_t (alpha_t S_{t-1} (k_t + lambda_t q_t) - v_t) k_t^T.
Vector qdelta(PaperState& s, const PaperToken& x) {
  const Vector q = l2(x.q), k = l2(x.k);
  const Matrix decayed = x.alpha * s.S;
  s.S = decayed - x.beta * outer(decayed * (k + x.lambda * q) - x.v, k);
  return x.scale * (s.S * q);
}

// Kaczmarz Linear Attention, appendix: the same step with a decay per key channel.
Vector kaczmarz_channel(PaperState& s, const PaperToken& x) {
  const Matrix decayed = s.S * diag(x.alpha_channel);
  const double step = x.beta / (square(x.k) + 1e-6);
  s.S = decayed + step * outer(x.v - decayed * x.k, x.k);
  return x.scale * (s.S * l2(x.q));
}

// Normalised least mean squares: after the step S k = v, but for eps.
Vector nlms(PaperState& s, const PaperToken& x) {
  s.S = s.S + 1 / (square(x.k) + 1e-6) * outer(x.v - s.S * x.k, x.k);
  return x.scale * (s.S * x.q);
}

// Liu et al. 2024, Longhorn: S_t minimises |S - S_{t-1}|^2 + beta |S k - v|^2. Sherman and Morrison solve it: S_t =
// (S_{t-1} + beta v k^T) (I + beta k k^T)^-1. Here (I + beta k k^T)^-1 = I - beta k k^T / (1 + beta |k|^2).
Vector longhorn(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  const Matrix inverse = identity(k) - x.beta / (1 + x.beta * square(k)) * outer(k, k);
  s.S = (s.S + x.beta * outer(x.v, k)) * inverse;
  return x.scale * (s.S * l2(x.q));
}

// EFLA: the gradient flow dS/dtau = (v - S k) k^T followed exactly for the time beta: along k the error shrinks by
// exp(-beta |k|^2).
Vector efla(PaperState& s, const PaperToken& x) {
  const double shrink = std::exp(-x.beta * square(x.k));
  const Vector found = s.S * x.k;
  const Vector left = x.v + shrink * (found - x.v);
  s.S = s.S + 1 / square(x.k) * outer(left - found, x.k);
  return x.scale * (s.S * x.q);
}

// Preconditioned DeltaNet, stable form: A_t = alphaP A_{t-1} + betaP k (.) k, M = x^(-softsign(log(A + 1e-6) -
// center)).
Vector preconditioner(PaperState& s, const PaperToken& x, const Vector& k) {
  s.A = x.precond_alpha * s.A + x.precond_beta * hadamard(k, k);
  Vector m(k.size());
  for (size_t i = 0; i < k.size(); ++i) {
    const double log_ratio = std::log(s.A[i] + 1e-6) - x.precond_center;
    m[i] = std::pow(1.5, -log_ratio / (1 + std::abs(log_ratio)));
  }
  return m;
}

// The gradient step along M k instead of k: S_t = alpha_t S_{t-1} (I - beta_t k_t (M_t k_t)^T) + beta_t v_t (M_t
// k_t)^T.
Vector precond_gated_deltanet(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  const Vector preconditioned = diag(preconditioner(s, x, k)) * k;
  s.S = (x.alpha * s.S) * (identity(k) - x.beta * outer(k, preconditioned)) + x.beta * outer(x.v, preconditioned);
  return x.scale * (s.S * l2(x.q));
}

Vector precond_deltanet(PaperState& s, const PaperToken& x) {
  PaperToken undecayed = x;
  undecayed.alpha = 1;
  return precond_gated_deltanet(s, undecayed);
}

// The implicit step in the preconditioner's metric: S_t minimises |(S - S_{t-1}) M^-1/2|^2 + beta |S k - v|^2, which
// Sherman and Morrison solve: S_t = (S_{t-1} M^-1 + beta v k^T) (M^-1 + beta k k^T)^-1.
Vector precond_longhorn(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k), m = preconditioner(s, x, k);
  Vector inverse_m(m.size());
  for (size_t i = 0; i < m.size(); ++i) inverse_m[i] = 1 / m[i];
  const Vector mk = hadamard(m, k);
  const Matrix inverse = diag(m) - x.beta / (1 + x.beta * dot(k, mk)) * outer(mk, mk);
  s.S = (s.S * diag(inverse_m) + x.beta * outer(x.v, k)) * inverse;
  return x.scale * (s.S * l2(x.q));
}

Vector precond_kda(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  const Vector preconditioned = diag(preconditioner(s, x, k)) * k;
  s.S = (s.S * diag(x.alpha_channel)) * (identity(k) - x.beta * outer(k, preconditioned)) +
        x.beta * outer(x.v, preconditioned);
  return x.scale * (s.S * l2(x.q));
}

// The offline solve: nothing is erased, the preconditioner corrects what is read, o = S (M q).
Vector read_preconditioned(PaperState& s, const PaperToken& x, const Matrix& decayed) {
  const Vector k = l2(x.k);
  const Vector m = preconditioner(s, x, k);
  s.S = decayed + x.beta * outer(x.v, k);
  return x.scale * (s.S * hadamard(m, l2(x.q)));
}
Vector precond_linear(PaperState& s, const PaperToken& x) { return read_preconditioned(s, x, s.S); }
Vector precond_mamba2(PaperState& s, const PaperToken& x) { return read_preconditioned(s, x, x.alpha * s.S); }
Vector precond_gla(PaperState& s, const PaperToken& x) {
  return read_preconditioned(s, x, s.S * diag(x.alpha_channel));
}

// Comba: the erase acts on the state before the decay and has a gain of its own. The read is corrected by what the key
// answers. S_t = S_{t-1} (alpha_t - beta'_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t (q_t - d k_t).
Vector comba(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.S = x.alpha * s.S - outer(x.beta_erase * (s.S * k) - x.beta * x.v, k);
  return x.scale * (s.S * (l2(x.q) - x.d * k));
}

double mean(const Vector& x) {
  double sum = 0;
  for (double y : x) sum += y;
  return sum / static_cast<double>(x.size());
}

// Gated DeltaNet-2's ablations: one of the two gates is its mean.
Vector gated_deltanet2_b_only(PaperState& s, const PaperToken& x) {
  PaperToken averaged = x;
  averaged.w = Vector(x.w.size(), mean(x.w));
  return gated_deltanet2(s, averaged);
}
Vector gated_deltanet2_w_only(PaperState& s, const PaperToken& x) {
  PaperToken averaged = x;
  averaged.b = Vector(x.b.size(), mean(x.b));
  return gated_deltanet2(s, averaged);
}

// Kaczmarz's ablations: eta = 1, and no division by |k|^2.
Vector kaczmarz_full(PaperState& s, const PaperToken& x) {
  PaperToken full = x;
  full.beta = 1;
  return kaczmarz(s, full);
}
Vector kaczmarz_plain(PaperState& s, const PaperToken& x) {
  const Matrix decayed = x.alpha * s.S;
  s.S = decayed + x.beta * outer(x.v - decayed * x.k, x.k);
  return x.scale * (s.S * l2(x.q));
}

Vector qdelta_fixed(PaperState& s, const PaperToken& x) {
  PaperToken fixed = x;
  fixed.lambda = 0.5;
  return qdelta(s, fixed);
}
Vector qdelta_no_decay(PaperState& s, const PaperToken& x) {
  PaperToken undecayed = x;
  undecayed.alpha = 1;
  return qdelta(s, undecayed);
}

// The step along `direction` instead of k.
Vector step_along(PaperState& s, const PaperToken& x, const Matrix& decayed, const Vector& k, const Vector& direction) {
  s.S = decayed - x.beta * outer(decayed * k - x.v, direction);
  return x.scale * (s.S * l2(x.q));
}

// The exact diagonal form: w = (A_{t-1} + L)^-1 k / (1 + k^T (A_{t-1} + L)^-1 k), L = 1.
Vector precond_exact(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  Vector w = k;
  for (size_t i = 0; i < w.size(); ++i) w[i] /= s.A[i] + 1;
  w = 1 / (1 + dot(k, w)) * w;
  s.A = x.precond_alpha * s.A + x.precond_beta * hadamard(k, k);
  return step_along(s, x, s.S, k, w);
}

// The same Gram matrix in the offline solve: what is read is q / (A_t + L).
Vector precond_exact_read(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.A = x.precond_alpha * s.A + x.precond_beta * hadamard(k, k);
  Vector q = l2(x.q);
  for (size_t i = 0; i < q.size(); ++i) q[i] /= s.A[i] + 1;
  s.S = s.S + x.beta * outer(x.v, k);
  return x.scale * (s.S * q);
}

// The other squashing function: M = x^(-tanh(log(A + 1e-6) - center)).
Vector precond_tanh(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  s.A = x.precond_alpha * s.A + x.precond_beta * hadamard(k, k);
  Vector preconditioned = k;
  for (size_t i = 0; i < k.size(); ++i)
    preconditioned[i] *= std::pow(1.5, -std::tanh(std::log(s.A[i] + 1e-6) - x.precond_center));
  s.S = (x.alpha * s.S) * (identity(k) - x.beta * outer(k, preconditioned)) + x.beta * outer(x.v, preconditioned);
  return x.scale * (s.S * l2(x.q));
}

// One-sided ranges: the square root of the two-sided M, moved to below or above 1.
Vector precond_low(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  Vector m = preconditioner(s, x, k);
  for (double& y : m) y = std::sqrt(y / 1.5);
  return step_along(s, x, x.alpha * s.S, k, hadamard(m, k));
}
Vector precond_high(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k);
  Vector m = preconditioner(s, x, k);
  for (double& y : m) y = std::sqrt(y * 1.5);
  return step_along(s, x, x.alpha * s.S, k, hadamard(m, k));
}

// The normalisers of w = M k: 1 / (k^T M k), 1 / (1 + k^T M k), beta / (alpha + beta k^T M k).
Vector precond_norm_key(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k), w = hadamard(preconditioner(s, x, k), k);
  return step_along(s, x, x.alpha * s.S, k, 1 / dot(k, w) * w);
}
Vector precond_norm_one_plus(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k), w = hadamard(preconditioner(s, x, k), k);
  return step_along(s, x, x.alpha * s.S, k, 1 / (1 + dot(k, w)) * w);
}
Vector precond_norm_gated(PaperState& s, const PaperToken& x) {
  const Vector k = l2(x.k), w = hadamard(preconditioner(s, x, k), k);
  return step_along(s, x, x.alpha * s.S, k, x.precond_beta / (x.precond_alpha + x.precond_beta * dot(k, w)) * w);
}

// The slice of one head of a [T, heads, dim] tensor; empty where the rule has none.
Vector slice(const Vector& x, int64_t row, int64_t heads, int64_t head, int64_t dim) {
  if (x.empty()) return {};
  const auto first = x.begin() + (row * heads + head) * dim;
  return Vector(first, first + dim);
}

double scalar(const Vector& x, int64_t row, int64_t heads, int64_t head) {
  return x.empty() ? 0 : x[row * heads + head];
}

PaperToken token_of(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& in, int64_t row, int64_t h) {
  const int64_t hk = h / (s.HV / s.H);
  const auto channel = [&](const Vector& x, int64_t heads) {
    const int64_t count = heads_or_key_heads(heads, s);
    return slice(x, row, count, count == s.HV ? h : hk, s.K);
  };
  PaperToken x{};
  x.q = slice(in.q, row, s.H, hk, s.K);
  x.k = slice(in.k, row, s.H, hk, s.K);
  x.v = slice(in.v, row, s.HV, h, s.V);
  x.p = slice(in.erase_key, row, s.H, hk, s.K);
  x.f = slice(in.erase_write, row, s.H, hk, s.K);
  if (rule.decay == Decay::kScalar) x.alpha = std::exp(scalar(in.g, row, s.HV, h));
  if (rule.decay == Decay::kChannel) {
    x.alpha_channel = channel(in.g, s.g_heads);
    for (double& g : x.alpha_channel) g = std::exp(g);
  }
  x.beta = scalar(in.beta, row, s.HV, h);
  x.lambda = scalar(in.lambda, row, s.HV, h);
  if (rule.erase == Gate::kScalar) {
    x.beta_erase = scalar(in.erase_gate, row, s.HV, h);
  } else {
    x.b = channel(in.erase_gate, s.erase_heads);
  }
  x.w = slice(in.write_gate, row, s.HV, h, s.V);
  x.d = scalar(in.read_correction, row, s.HV, h);
  x.precond_alpha = std::exp(scalar(in.precond_g, row, s.H, hk));
  x.precond_beta = scalar(in.precond_beta, row, s.H, hk);
  x.precond_center = in.precond_center.empty() ? 0 : in.precond_center[hk];
  x.head = h;
  x.scale = s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.K));
  return x;
}

}  // namespace

std::span<const PaperRule> paper_rules() {
  static const PaperRule list[] = {
      {"linear_attention", false, linear_attention},
      {"retnet", false, retnet},
      {"mamba2", false, mamba2},
      {"gla", false, gla},
      {"deltanet", true, deltanet},
      {"gated_deltanet", true, gated_deltanet},
      {"kda", false, kda},
      {"gated_deltanet2", false, gated_deltanet2},
      {"kaczmarz", true, kaczmarz},
      {"qdelta", true, qdelta},
      {"precond_gated_deltanet", true, precond_gated_deltanet},
      // A gain (the erase gate of the last) up to 2: the same formulas.
      {"deltanet_neg", true, deltanet},
      {"gated_deltanet_neg", true, gated_deltanet},
      {"kda_neg", false, kda},
      {"gated_deltanet2_neg", false, gated_deltanet2},
      {"kaczmarz_channel", true, kaczmarz_channel},
      {"nlms", true, nlms},
      {"longhorn", true, longhorn},
      {"efla", true, efla},
      {"precond_deltanet", true, precond_deltanet},
      {"precond_longhorn", true, precond_longhorn},
      {"precond_kda", true, precond_kda},
      {"precond_linear", true, precond_linear},
      {"precond_mamba2", true, precond_mamba2},
      {"precond_gla", true, precond_gla},
      {"comba", true, comba},
      {"hgrn2", false, hgrn2},
      {"dplr", true, dplr},
      // Ablations.
      {"gated_deltanet2_b_only", false, gated_deltanet2_b_only},
      {"gated_deltanet2_w_only", false, gated_deltanet2_w_only},
      {"kaczmarz_full", true, kaczmarz_full},
      {"kaczmarz_plain", true, kaczmarz_plain},
      {"qdelta_fixed", true, qdelta_fixed},
      {"qdelta_no_decay", true, qdelta_no_decay},
      {"precond_exact", true, precond_exact},
      {"precond_exact_read", true, precond_exact_read},
      {"precond_low", true, precond_low},
      {"precond_high", true, precond_high},
      {"precond_tanh", true, precond_tanh},
      {"precond_norm_key", true, precond_norm_key},
      {"precond_norm_one_plus", true, precond_norm_one_plus},
      {"precond_norm_gated", true, precond_norm_gated},
  };
  return list;
}

const PaperRule* find_paper_rule(std::string_view name) {
  for (const PaperRule& paper : paper_rules()) {
    if (paper.name == name) return &paper;
  }
  return nullptr;
}

ReferenceOutputs paper_forward(const PaperRule& paper, const Rule& rule, const ReferenceShape& s,
                               const ReferenceInputs& in) {
  check_inputs(rule, s, in);
  ReferenceOutputs out;
  for (const auto& field : reference_output_fields())
    (out.*field.values).assign(static_cast<size_t>(field.count(rule, s)), 0.0);
  for (int64_t n = 0; n < s.sequences.count(); ++n) {
    for (int64_t h = 0; h < s.HV; ++h) {
      const int64_t hk = h / (s.HV / s.H);
      Matrix S(s.K, s.V);
      if (!in.initial_state.empty()) S.a = slice(in.initial_state, n, s.HV, h, s.K * s.V);
      PaperState state{paper.value_by_key ? transpose(S) : S, Vector(static_cast<size_t>(s.K), 0.0)};
      if (!in.initial_precond.empty()) state.A = slice(in.initial_precond, n, s.H, hk, s.K);
      for (int64_t row = s.sequences.begin(n); row < s.sequences.end(n); ++row) {
        const Vector o = paper.token(state, token_of(rule, s, in, row, h));
        std::copy(o.begin(), o.end(), out.o.begin() + (row * s.HV + h) * s.V);
      }
      S = paper.value_by_key ? transpose(state.S) : state.S;
      std::copy(S.a.begin(), S.a.end(), out.final_state.begin() + (n * s.HV + h) * s.K * s.V);
      if (rule.uses_precond())
        std::copy(state.A.begin(), state.A.end(), out.final_precond.begin() + (n * s.H + hk) * s.K);
    }
  }
  return out;
}

}  // namespace fw
