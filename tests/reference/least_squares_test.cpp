// Least squares with the exact inverse Gram matrix. The online and the offline solve are one (Theorem 3.1 of the
// preconditioned paper), and both equal a direct solve. A diagonal approximation of the Gram matrix parts them.
#include "reference/least_squares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/random.h"
#include "support/recurrence.h"

namespace fw {
namespace {

using Vec = std::vector<double>;

// An inverse Gram matrix loses digits with the condition number of the Gram matrix, here below 1e5: 1e5 * 2^-53 *
// sqrt(T) is a hundred times less than this.
constexpr double kSolveBound = 1e-10;

struct Options {
  int64_t T = 40, K = 5, V = 3;
  double ridge = 1;
  bool state_decay = false, gram_decay = false, initial_state = false;
  double common = 0;  // share of (1, .., 1), a direction that all keys have in common and no channel has for itself
  uint64_t seed = 1;
};

LeastSquaresProblem random_least_squares(const Options& o) {
  Random random(o.seed);
  const auto normals = [&](int64_t n) {
    Vec x(static_cast<size_t>(n));
    for (double& y : x) y = random.normal();
    return x;
  };
  const auto uniforms = [&](int64_t n, double low, double high) {
    Vec x(static_cast<size_t>(n));
    for (double& y : x) y = random.uniform(low, high);
    return x;
  };
  LeastSquaresProblem p;
  p.T = o.T;
  p.K = o.K;
  p.V = o.V;
  p.ridge = o.ridge;
  p.q = normals(o.T * o.K);
  p.k = normals(o.T * o.K);
  p.v = normals(o.T * o.V);
  p.beta = uniforms(o.T, 0.1, 2);
  for (double& k : p.k) k = (1 - o.common) * k + o.common;
  if (o.state_decay) p.state_decay = uniforms(o.T, 0.5, 1);
  if (o.gram_decay) p.gram_decay = uniforms(o.T, 0.9, 1);
  if (o.initial_state) p.initial_state = normals(o.K * o.V);
  return p;
}

template <class Body>
void for_each_problem(Body&& body) {
  Options o;
  for (const int64_t K : {1, 2, 5, 12}) {
    for (const int64_t V : {1, 3, 7}) {
      for (const double ridge : {0.05, 1.0, 30.0}) {
        for (int decays = 0; decays < 4; ++decays) {
          o.K = K;
          o.V = V;
          o.ridge = ridge;
          o.state_decay = decays % 2 == 1;
          o.gram_decay = decays / 2 == 1;
          o.initial_state = o.seed % 2 == 0;
          o.common = o.seed % 3 == 0 ? 0.8 : 0;
          ++o.seed;
          SCOPED_TRACE(::testing::Message()
                       << "K=" << K << " V=" << V << " ridge=" << ridge << " decays=" << decays << " seed=" << o.seed);
          body(random_least_squares(o));
        }
      }
    }
  }
}

// A S = B by Gaussian elimination with row exchanges, A [n, n], B [n, m].
Vec solve(Vec A, Vec B, int64_t n, int64_t m) {
  for (int64_t c = 0; c < n; ++c) {
    int64_t pivot = c;
    for (int64_t r = c + 1; r < n; ++r) {
      if (std::abs(A[r * n + c]) > std::abs(A[pivot * n + c])) pivot = r;
    }
    std::swap_ranges(&A[c * n], &A[c * n] + n, &A[pivot * n]);
    if (pivot != c) std::swap_ranges(&B[c * m], &B[c * m] + m, &B[pivot * m]);
    for (int64_t r = 0; r < n; ++r) {
      if (r == c) continue;
      const double factor = A[r * n + c] / A[c * n + c];
      for (int64_t j = 0; j < n; ++j) A[r * n + j] -= factor * A[c * n + j];
      for (int64_t j = 0; j < m; ++j) B[r * m + j] -= factor * B[c * m + j];
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t j = 0; j < m; ++j) B[r * m + j] /= A[r * n + r];
  }
  return B;
}

double product(const Vec& x, int64_t begin, int64_t end) {
  return x.empty() ? 1 : std::accumulate(x.begin() + begin, x.begin() + end, 1.0, std::multiplies<>());
}

// The minimiser after `t` tokens of the sum that least_squares.h gives, from its normal equations, with nothing
// recurrent.
Vec direct_state(const LeastSquaresProblem& p, int64_t t) {
  const int64_t K = p.K, V = p.V;
  Vec A(static_cast<size_t>(K * K), 0.0), B(static_cast<size_t>(K * V), 0.0);
  const double ridge = p.ridge * product(p.gram_decay, 0, t), shrink = product(p.state_decay, 0, t);
  for (int64_t i = 0; i < K; ++i) {
    A[i * K + i] = ridge;
    for (int64_t j = 0; j < V && !p.initial_state.empty(); ++j)
      B[i * V + j] = ridge * shrink * p.initial_state[i * V + j];
  }
  for (int64_t s = 0; s < t; ++s) {
    const double weight = p.beta[s] * product(p.gram_decay, s + 1, t),
                 value = weight * product(p.state_decay, s + 1, t);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < K; ++j) A[i * K + j] += weight * p.k[s * K + i] * p.k[s * K + j];
      for (int64_t j = 0; j < V; ++j) B[i * V + j] += value * p.k[s * K + i] * p.v[s * V + j];
    }
  }
  return solve(A, B, K, V);
}

TEST(LeastSquares, OnlineAndOfflineGiveTheSameOutputs) {
  for_each_problem([](const LeastSquaresProblem& p) {
    const LeastSquaresOutputs is_delta = least_squares_online(p), additive = least_squares_offline(p);
    EXPECT_LE(relative_error(is_delta.o, additive.o), kSolveBound);
    EXPECT_LE(relative_error(is_delta.final_state, additive.final_state), kSolveBound);
  });
}

TEST(LeastSquares, EveryTokenEqualsADirectSolve) {
  for_each_problem([](const LeastSquaresProblem& p) {
    const LeastSquaresOutputs is_delta = least_squares_online(p);
    Vec expected;
    for (int64_t t = 0; t < p.T; ++t) {
      const Vec S = direct_state(p, t + 1);
      for (int64_t j = 0; j < p.V; ++j) {
        double o = 0;
        for (int64_t i = 0; i < p.K; ++i) o += S[i * p.V + j] * p.q[t * p.K + i];
        expected.push_back(o);
      }
    }
    EXPECT_LE(relative_error(is_delta.o, expected), kSolveBound);
    EXPECT_LE(relative_error(is_delta.final_state, direct_state(p, p.T)), kSolveBound);
  });
}

// The placement of the decays is part of the theorem: when the accumulation decays like the online state although the
// Gram matrix decays too, the outputs differ.
TEST(LeastSquares, AnotherPlacementOfTheDecaysIsAnotherRule) {
  Options o;
  o.state_decay = o.gram_decay = true;
  LeastSquaresProblem p = random_least_squares(o);
  const LeastSquaresOutputs additive = least_squares_offline(p);
  for (int64_t t = 0; t < p.T; ++t) p.state_decay[t] *= p.gram_decay[t];
  EXPECT_GT(relative_error(least_squares_online(p).o, additive.o), 0.01);
}

TEST(LeastSquares, ADiagonalGramMatrixBreaksTheEquality) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Options o;
    o.K = 2 + static_cast<int64_t>(seed % 7);
    o.common = 0.7;
    o.state_decay = seed % 2 == 0;
    o.gram_decay = seed % 3 == 0;
    o.seed = seed;
    const LeastSquaresProblem p = random_least_squares(o);
    const LeastSquaresOutputs is_delta = least_squares_online(p, Gram::kDiagonal),
                              additive = least_squares_offline(p, Gram::kDiagonal);
    EXPECT_GT(relative_error(is_delta.o, additive.o), 0.1) << "seed " << seed;
    const LeastSquaresOutputs exact = least_squares_online(p);
    EXPECT_GT(relative_error(is_delta.o, exact.o), 0.1) << "seed " << seed;
    EXPECT_GT(relative_error(additive.o, exact.o), 0.1) << "seed " << seed;
  }
}

// By how much: for a key k that comes again and again all solves converge to v but the diagonal offline one, which
// counts it once a channel. T tokens: ridge + T k_i^2 a channel against ridge + T |k|^2.
TEST(LeastSquares, ADiagonalGramMatrixReadsARepeatedKeyOnceAChannel) {
  Options o;
  o.K = 6;
  o.common = 1;
  LeastSquaresProblem p = random_least_squares(o);
  p.q = p.k;
  p.beta.clear();
  for (int64_t i = p.V; i < p.T * p.V; ++i) p.v[i] = p.v[i % p.V];
  const auto last_over_v = [&](const LeastSquaresOutputs& out) { return out.o[(p.T - 1) * p.V] / p.v[0]; };
  const auto T = static_cast<double>(p.T), K = static_cast<double>(p.K);
  EXPECT_NEAR(last_over_v(least_squares_online(p)), T * K / (p.ridge + T * K), 1e-12);
  EXPECT_NEAR(last_over_v(least_squares_offline(p, Gram::kDiagonal)), T * K / (p.ridge + T), 1e-12);
  EXPECT_GT(last_over_v(least_squares_offline(p, Gram::kDiagonal)), K - 0.2);
}

// Where the Gram matrix is diagonal the approximation is none: one channel, and keys along the axes.
TEST(LeastSquares, ADiagonalGramMatrixIsExactForOneChannelAndForKeysAlongTheAxes) {
  for_each_problem([](LeastSquaresProblem p) {
    for (int64_t t = 0; t < p.T; ++t) {
      for (int64_t i = 0; i < p.K; ++i) {
        if (i != t * 7 % p.K) p.k[t * p.K + i] = 0;
      }
    }
    const LeastSquaresOutputs exact = least_squares_online(p);
    EXPECT_LE(relative_error(least_squares_online(p, Gram::kDiagonal).o, exact.o), kSolveBound);
    EXPECT_LE(relative_error(least_squares_offline(p, Gram::kDiagonal).o, exact.o), kSolveBound);
  });
}

// A rule of the product on the problem's tokens and state, with the gates given.
ReferenceOutputs run_rule(const std::string& rule, const LeastSquaresProblem& p, ReferenceInputs in) {
  ReferenceShape shape{SeqLayout::uniform(1, p.T), 1, 1, p.K, p.V};
  shape.scale = 1;
  in.q = p.q;
  in.k = p.k;
  in.v = p.v;
  in.initial_state = p.initial_state;
  return reference_forward(parse_rule(rule), shape, in);
}

// The product's rules with the exact diagonal, online (it writes M k) and offline (it reads M q): the solve itself for
// keys along the axes, and two rules for keys that are correlated.
TEST(LeastSquares, TheRulesWithADiagonalMeetItForKeysAlongTheAxesOnly) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (const bool along_axes : {true, false}) {
      Options o;
      o.state_decay = seed % 2 == 0;
      o.common = 0.7;
      o.ridge = 0.5;
      o.seed = seed;
      LeastSquaresProblem p = random_least_squares(o);
      for (int64_t i = 0; i < p.T * p.K && along_axes; ++i) {
        if (i % p.K != i / p.K % p.K) p.k[i] = 0;
      }
      ReferenceInputs online_gates, offline_gates;
      std::string decay;
      if (o.state_decay) {
        decay = " decay=scalar";
        for (const double a : p.state_decay) online_gates.g.push_back(std::log(a));
      }
      online_gates.precond_g.assign(static_cast<size_t>(p.T), 0.0);
      online_gates.precond_beta = p.beta;
      offline_gates = online_gates;
      offline_gates.beta = p.beta;
      const ReferenceOutputs is_delta = run_rule(
          "precond=diagonal precond_form=inverse_previous normaliser=gated precond_ridge=0.5" + decay, p, online_gates);
      const ReferenceOutputs additive = run_rule(
          "update=additive gain=gate precond=read precond_form=inverse precond_ridge=0.5" + decay, p, offline_gates);
      const LeastSquaresOutputs exact = least_squares_online(p);
      if (along_axes) {
        EXPECT_LE(relative_error(is_delta.o, exact.o), kSolveBound) << "seed " << seed;
        EXPECT_LE(relative_error(additive.o, exact.o), kSolveBound) << "seed " << seed;
      } else {
        EXPECT_GT(relative_error(is_delta.o, additive.o), 0.1) << "seed " << seed;
      }
    }
  }
}

// With weight beta and ridge 1 the first step from a state is the implicit one, the product's Longhorn rule; and keys
// that are orthogonal to each other do not see each other.
TEST(LeastSquares, WithOrthogonalKeysIsLonghorn) {
  Options o;
  o.T = o.K = 5;
  o.initial_state = true;
  LeastSquaresProblem p = random_least_squares(o);
  for (int64_t t = 0; t < p.T; ++t) {
    for (int64_t i = 0; i < p.K; ++i) {
      if (i != t) p.k[t * p.K + i] = 0;
    }
  }
  ReferenceInputs gates;
  gates.beta = p.beta;
  const ReferenceOutputs out = run_rule("longhorn q_norm=raw k_norm=raw", p, gates);
  const LeastSquaresOutputs exact = least_squares_online(p);
  EXPECT_LE(relative_error(exact.o, out.o), 1e-14);
  EXPECT_LE(relative_error(exact.final_state, out.final_state), 1e-14);
}

TEST(LeastSquares, NoTokensKeepTheState) {
  Options o;
  o.T = 0;
  o.initial_state = true;
  const LeastSquaresProblem p = random_least_squares(o);
  for (const Gram gram : {Gram::kFull, Gram::kDiagonal}) {
    EXPECT_TRUE(least_squares_online(p, gram).o.empty());
    EXPECT_EQ(least_squares_online(p, gram).final_state, p.initial_state);
    EXPECT_LE(relative_error(least_squares_offline(p, gram).final_state, p.initial_state), 1e-15);
  }
}

// T = 1 from nothing: S = beta k v^T / (p ridge + beta |k|^2).
TEST(LeastSquares, OneTokenIsTheRidgeFormula) {
  Options o;
  o.T = 1;
  o.gram_decay = true;
  o.ridge = 0.3;
  const LeastSquaresProblem p = random_least_squares(o);
  const double square = std::inner_product(p.k.begin(), p.k.end(), p.k.begin(), 0.0);
  Vec S;
  for (const double k : p.k) {
    for (const double v : p.v) S.push_back(p.beta[0] * k * v / (p.gram_decay[0] * p.ridge + p.beta[0] * square));
  }
  EXPECT_LE(relative_error(least_squares_online(p).final_state, S), 1e-15);
  EXPECT_LE(relative_error(least_squares_offline(p).final_state, S), 1e-14);
}

// Nothing is learned from a zero key or a zero weight; what is there decays.
TEST(LeastSquares, ZeroKeysAndZeroWeightsOnlyDecayTheState) {
  for (const bool zero_weights : {false, true}) {
    Options o;
    o.state_decay = o.gram_decay = o.initial_state = true;
    LeastSquaresProblem p = random_least_squares(o);
    Vec& zero = zero_weights ? p.beta : p.k;
    std::fill(zero.begin(), zero.end(), 0.0);
    Vec expected = p.initial_state;
    for (double& x : expected) x *= product(p.state_decay, 0, p.T);
    for (const Gram gram : {Gram::kFull, Gram::kDiagonal}) {
      EXPECT_LE(relative_error(least_squares_online(p, gram).final_state, expected), 1e-14);
      EXPECT_LE(relative_error(least_squares_offline(p, gram).final_state, expected), 1e-13);
    }
  }
}

// A state that decays to 0 begins again with the next token; what the Gram matrix knows of earlier keys stays.
TEST(LeastSquares, AStateForgottenAtOnceStillSatisfiesTheTheorem) {
  Options o;
  o.state_decay = o.gram_decay = o.initial_state = true;
  LeastSquaresProblem p = random_least_squares(o);
  p.state_decay[p.T / 2] = 0;
  const LeastSquaresOutputs is_delta = least_squares_online(p);
  EXPECT_LE(relative_error(is_delta.o, least_squares_offline(p).o), kSolveBound);
  EXPECT_LE(relative_error(is_delta.final_state, direct_state(p, p.T)), kSolveBound);
}

TEST(LeastSquares, RefusesWhatDoesNotFit) {
  Options o;
  o.gram_decay = o.state_decay = true;
  const LeastSquaresProblem good = random_least_squares(o);
  const auto expect_refused = [&](auto&& change) {
    LeastSquaresProblem p = good;
    change(p);
    EXPECT_THROW(least_squares_online(p), Error);
    EXPECT_THROW(least_squares_offline(p), Error);
  };
  EXPECT_NO_THROW(least_squares_online(good));
  expect_refused([](LeastSquaresProblem& p) { p.ridge = 0; });
  expect_refused([](LeastSquaresProblem& p) { p.K = 0; });
  expect_refused([](LeastSquaresProblem& p) { p.q.pop_back(); });
  expect_refused([](LeastSquaresProblem& p) { p.k.clear(); });
  expect_refused([](LeastSquaresProblem& p) { p.v.push_back(0); });
  expect_refused([](LeastSquaresProblem& p) { p.beta[3] = -1; });
  expect_refused([](LeastSquaresProblem& p) { p.gram_decay[3] = 0; });
  expect_refused([](LeastSquaresProblem& p) { p.state_decay[3] = 1.1; });
  expect_refused([](LeastSquaresProblem& p) { p.initial_state = {1}; });
}

}  // namespace
}  // namespace fw
