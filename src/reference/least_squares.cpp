#include "reference/least_squares.h"

#include "base/error.h"

namespace fw {
namespace {

using Vec = std::vector<double>;

double at_or_one(const Vec& x, int64_t t) { return x.empty() ? 1.0 : x[t]; }

void check_size(const char* name, const Vec& x, int64_t expected, bool optional) {
  const auto got = static_cast<int64_t>(x.size());
  if (got == expected || (optional && got == 0)) return;
  fail_usage("least squares: {}: expected {} values, got {}", name, expected, got);
}

void check_problem(const LeastSquaresProblem& p) {
  if (p.T < 0 || p.K < 1 || p.V < 1)
    fail_usage("least squares: shape: expected T >= 0 and K, V >= 1, got T={} K={} V={}", p.T, p.K, p.V);
  if (!(p.ridge > 0)) fail_usage("least squares: ridge: expected a number above 0, got {}", p.ridge);
  check_size("q", p.q, p.T * p.K, false);
  check_size("k", p.k, p.T * p.K, false);
  check_size("v", p.v, p.T * p.V, false);
  check_size("beta", p.beta, p.T, true);
  check_size("state_decay", p.state_decay, p.T, true);
  check_size("gram_decay", p.gram_decay, p.T, true);
  check_size("initial_state", p.initial_state, p.K * p.V, true);
  for (const double beta : p.beta) {
    if (!(beta >= 0)) fail_usage("least squares: beta: expected weights of at least 0, got {}", beta);
  }
  for (const double decay : p.state_decay) {
    if (!(decay >= 0 && decay <= 1)) fail_usage("least squares: state_decay: expected 0 to 1, got {}", decay);
  }
  for (const double decay : p.gram_decay) {
    if (!(decay > 0 && decay <= 1))
      fail_usage("least squares: gram_decay: expected above 0 and at most 1, got {}", decay);
  }
}

// P = A^-1, token by token.
class InverseGram {
 public:
  InverseGram(int64_t K, double ridge, Gram gram) : K_(K), gram_(gram), P_(static_cast<size_t>(K * K), 0.0) {
    for (int64_t i = 0; i < K; ++i) P_[i * K + i] = 1 / ridge;
  }

  // A becomes decay A + beta k k^T; returns P k for the new P, in the gain form P_{t-1} k / (decay + beta k.(P_{t-1}
  // k)).
  Vec update(const double* k, double beta, double decay) {
    Vec key = times(k);
    if (gram_ == Gram::kDiagonal) {
      for (int64_t i = 0; i < K_; ++i) {
        const double divisor = decay + beta * k[i] * key[i];
        P_[i * K_ + i] /= divisor;
        key[i] /= divisor;
      }
      return key;
    }
    double divisor = decay;
    for (int64_t i = 0; i < K_; ++i) divisor += beta * k[i] * key[i];
    for (int64_t i = 0; i < K_; ++i) {
      for (int64_t j = 0; j < K_; ++j) {
        double& x = P_[i * K_ + j];
        x = (x - beta / divisor * key[i] * key[j]) / decay;
      }
    }
    for (double& x : key) x /= divisor;
    return key;
  }

  // P x
  Vec times(const double* x) const {
    Vec y(static_cast<size_t>(K_), 0.0);
    for (int64_t i = 0; i < K_; ++i) {
      for (int64_t j = 0; j < K_; ++j) y[i] += P_[i * K_ + j] * x[j];
    }
    return y;
  }

 private:
  int64_t K_;
  Gram gram_;
  Vec P_;  // [K, K]
};

// S += a b^T, S [K, V]
void add_outer(const double* a, const double* b, int64_t K, int64_t V, Vec& S) {
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) S[i * V + j] += a[i] * b[j];
  }
}

// y = S^T x
void read(const Vec& S, const double* x, int64_t K, int64_t V, double* y) {
  for (int64_t j = 0; j < V; ++j) y[j] = 0;
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) y[j] += S[i * V + j] * x[i];
  }
}

Vec initial_state(const LeastSquaresProblem& p) {
  return p.initial_state.empty() ? Vec(static_cast<size_t>(p.K * p.V), 0.0) : p.initial_state;
}

}  // namespace

LeastSquaresOutputs least_squares_online(const LeastSquaresProblem& p, Gram gram) {
  check_problem(p);
  LeastSquaresOutputs out{Vec(static_cast<size_t>(p.T * p.V)), initial_state(p)};
  Vec& S = out.final_state;
  InverseGram P(p.K, p.ridge, gram);
  Vec u(static_cast<size_t>(p.V));
  for (int64_t t = 0; t < p.T; ++t) {
    const double* k = &p.k[t * p.K];
    const double beta = at_or_one(p.beta, t);
    const Vec key = P.update(k, beta, at_or_one(p.gram_decay, t));
    for (double& x : S) x *= at_or_one(p.state_decay, t);
    read(S, k, p.K, p.V, u.data());
    for (int64_t j = 0; j < p.V; ++j) u[j] = beta * (p.v[t * p.V + j] - u[j]);
    add_outer(key.data(), u.data(), p.K, p.V, S);
    read(S, &p.q[t * p.K], p.K, p.V, &out.o[t * p.V]);
  }
  return out;
}

LeastSquaresOutputs least_squares_offline(const LeastSquaresProblem& p, Gram gram) {
  check_problem(p);
  LeastSquaresOutputs out{Vec(static_cast<size_t>(p.T * p.V)), Vec(static_cast<size_t>(p.K * p.V), 0.0)};
  Vec B = initial_state(p);
  for (double& x : B) x *= p.ridge;
  InverseGram P(p.K, p.ridge, gram);
  Vec weighted(static_cast<size_t>(p.V));
  for (int64_t t = 0; t < p.T; ++t) {
    const double* k = &p.k[t * p.K];
    const double beta = at_or_one(p.beta, t), decay = at_or_one(p.gram_decay, t);
    P.update(k, beta, decay);
    for (double& x : B) x *= at_or_one(p.state_decay, t) * decay;
    for (int64_t j = 0; j < p.V; ++j) weighted[j] = beta * p.v[t * p.V + j];
    add_outer(k, weighted.data(), p.K, p.V, B);
    read(B, P.times(&p.q[t * p.K]).data(), p.K, p.V, &out.o[t * p.V]);
  }
  for (int64_t i = 0; i < p.K; ++i) {  // P_T B_T: row i reads with P_T e_i
    Vec unit(static_cast<size_t>(p.K), 0.0);
    unit[i] = 1;
    read(B, P.times(unit.data()).data(), p.K, p.V, &out.final_state[i * p.V]);
  }
  return out;
}

}  // namespace fw
