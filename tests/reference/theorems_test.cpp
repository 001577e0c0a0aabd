// Statements of the papers about sequences and objectives, on the product's rules. Preconditioned DeltaNet: Theorem 3.2
// (C.5), the example of C.2, the objective of G.1. Q-Delta: Theorem 3.2 and Eq. 12. Gated DeltaNet-2: its online
// objective. Statements about one step are in propositions_test.cpp and tracking_test.cpp.
#include <gtest/gtest.h>

#include <cmath>

#include "reference/least_squares.h"
#include "support/one_step.h"

namespace fw {
namespace {

using namespace testing;  // one_step.h's linear algebra

constexpr double kRounding = 1e-13;

// Tokens of one head.
struct Tokens {
  int64_t T = 0, K = 1, V = 1;
  ReferenceInputs in;
};

Tokens random_tokens(int64_t T, int64_t K, int64_t V, Random& random) {
  Tokens x{T, K, V, {}};
  x.in.q = normals(random, static_cast<size_t>(T * K));
  x.in.v = normals(random, static_cast<size_t>(T * V));
  for (int64_t t = 0; t < T; ++t) {
    Vec k = normals(random, static_cast<size_t>(K));
    k = 1 / norm(k) * k;
    x.in.k.insert(x.in.k.end(), k.begin(), k.end());
  }
  return x;
}

// Token t of a tensor whose tokens have n numbers.
Vec token(const Vec& all, int64_t t, int64_t n) { return {all.begin() + t * n, all.begin() + (t + 1) * n}; }

ReferenceOutputs run(const std::string& rule, const Tokens& x) {
  ReferenceShape shape{SeqLayout::uniform(1, x.T), 1, 1, x.K, x.V};
  shape.scale = 1;
  return reference_forward(parse_rule(rule), shape, x.in);
}

// ---- Preconditioned DeltaNet

// Mean and its standard error.
struct Mean {
  double sum = 0, squares = 0, n = 0;
  void add(double x) {
    sum += x;
    squares += x * x;
    ++n;
  }
  double mean() const { return sum / n; }
  double error() const { return std::sqrt((squares / n - mean() * mean()) / n); }
};

struct Distances {
  Mean delta, additive;  // |S_T - S*|^2 over |W|^2, S* the least squares solution
};

// Unit keys in random directions, v = W^T k + noise.
Distances distances(int64_t K, int64_t T, double beta, double noise, int draws, uint64_t seed) {
  Random random(seed);
  Distances result;
  for (int i = 0; i < draws; ++i) {
    Tokens x = random_tokens(T, K, 2, random);
    const Vec W = normals(random, static_cast<size_t>(K * x.V));
    for (int64_t t = 0; t < T; ++t) {
      const Vec v = transposed_times(W, token(x.in.k, t, K), static_cast<size_t>(x.V));
      for (int64_t j = 0; j < x.V; ++j) x.in.v[t * x.V + j] = v[j] + noise * x.in.v[t * x.V + j];
    }
    x.in.beta.assign(static_cast<size_t>(T), beta);
    LeastSquaresProblem p;
    p.T = T;
    p.K = K;
    p.V = x.V;
    p.ridge = 1e-9;
    p.q = x.in.q;
    p.k = x.in.k;
    p.v = x.in.v;
    const Vec solution = noise > 0 ? least_squares_online(p).final_state : W;
    result.delta.add(square(run("deltanet norm_eps=0", x).final_state - solution) / square(W));
    result.additive.add(square(run("update=additive gain=gate", x).final_state - solution) / square(W));
  }
  return result;
}

// The two expectations of C.5 in closed form. A projected direction keeps 1 - beta (2 - beta) / K of the error of a
// delta step; a sum of T outer products of unit keys has the second moment T + T (T - 1) / K.
TEST(PreconditionedDeltaNet, TheExpectedDistancesToTheTargetAreThoseOfTheorem32) {
  constexpr int64_t K = 8;
  for (const double beta : {0.5, 1.0}) {
    for (const int64_t T : {4, 12, 40}) {
      SCOPED_TRACE(::testing::Message() << "beta=" << beta << " T=" << T);
      const auto t = static_cast<double>(T), d = static_cast<double>(K);
      const Distances found = distances(K, T, beta, 0, 1500, 7 + static_cast<uint64_t>(T));
      const double delta = std::pow(1 - beta * (2 - beta) / d, t),
                   additive = 1 + (-2 * beta * t + beta * beta * (t + t * (t - 1) / d)) / d;
      EXPECT_NEAR(found.delta.mean(), delta, 4 * found.delta.error());
      EXPECT_NEAR(found.additive.mean(), additive, 4 * found.additive.error());
      EXPECT_LT(found.additive.error() / additive, 0.03);
      if (T > K || beta == 1) {
        EXPECT_LT(delta, additive);
      }
    }
  }
}

// Theorem 3.2: after more tokens than channels DeltaNet is nearer to the least squares solution than linear attention,
// with and without noise.
TEST(PreconditionedDeltaNet, DeltaNetIsNearerToLeastSquaresThanLinearAttention) {
  for (const int64_t K : {4, 16}) {
    for (const int64_t T : {K + 1, 2 * K, 4 * K}) {
      for (const double noise : {0.0, 0.3}) {
        if (noise > 0 && T < 2 * K) continue;  // the solution of T near K tokens is noise without a second moment
        const Distances found = distances(K, T, 1, noise, 200, static_cast<uint64_t>(T));
        EXPECT_LT(found.delta.mean() + 4 * found.delta.error(), found.additive.mean() - 4 * found.additive.error())
            << "K=" << K << " T=" << T << " noise=" << noise;
      }
    }
  }
}

// The example of C.2: keys (1, 1), (1, -1) with values 1, 0 and ridge 1. The exact solves both give 1/3 a channel; with
// the diagonal the online one gives 1/2.
TEST(PreconditionedDeltaNet, TheExampleOfC2) {
  LeastSquaresProblem p;
  p.T = 2;
  p.K = 2;
  p.V = 1;
  p.k = {1, 1, 1, -1};
  p.q = {1, 1, 1, 0};
  p.v = {1, 0};
  const auto answer = [](const LeastSquaresOutputs& out) { return out.o[1]; };
  EXPECT_NEAR(answer(least_squares_online(p)), 1.0 / 3, 1e-15);
  EXPECT_NEAR(answer(least_squares_offline(p)), 1.0 / 3, 1e-15);
  EXPECT_NEAR(answer(least_squares_offline(p, Gram::kDiagonal)), 1.0 / 3, 1e-15);
  EXPECT_NEAR(answer(least_squares_online(p, Gram::kDiagonal)), 1.0 / 2, 1e-15);
}

// |S - center|^2 / 2 in the norm of Diag(M)^-1, less <S^T key, value>: convex, so that the state which nothing improves is the only minimum.
struct LinearObjective {
  Vec center, key, value, M;
  double operator()(const Vec& S) const {
    double quadratic = 0;
    const Vec off = S - center;
    for (size_t i = 0; i < off.size(); ++i) quadratic += off[i] * off[i] / M[i / value.size()];
    return quadratic / 2 - dot(transposed_times(S, key, value.size()), value);
  }
};

void expect_minimises(const LinearObjective& objective, const Vec& S, uint64_t seed) {
  Random random(seed);
  const double least = objective(S);
  for (int i = 0; i < 5; ++i) {
    const Vec D = normals(random, S.size());
    LinearObjective rise{Vec(S.size(), 0.0), objective.key, Vec(objective.value.size(), 0.0), objective.M};
    EXPECT_NEAR((objective(S + D) - least) / rise(D), 1, 1e-10);
    EXPECT_NEAR((objective(S - D) - least) / rise(D), 1, 1e-10);
  }
}

// G.1: the preconditioned step descends the loss |S^T k - v|^2 / 2, linear about the decayed state, and stays near it
// in the norm of the preconditioner.
TEST(PreconditionedDeltaNet, TheStepMinimisesTheObjectiveOfG1) {
  for_each_step([](Step x) {
    Random random(x.seed);
    const double a = random.uniform(0.5, 1);
    x.in.g = {std::log(a)};
    x.in.precond_g = {-0.1};
    x.in.precond_beta = {random.uniform(0, 2)};
    x.in.precond_center = {random.uniform(-4, 1)};
    const Vec k = 1 / norm(x.k) * x.k, center = a * x.S0;
    Vec M(k.size());
    for (size_t i = 0; i < k.size(); ++i) {  // Eq. 9 from an empty A
      const double y = std::log(x.in.precond_beta[0] * k[i] * k[i] + 1e-6) - x.in.precond_center[0];
      M[i] = std::pow(1.5, -y / (1 + std::abs(y)));
    }
    const Vec downhill = x.in.beta[0] * (x.v - transposed_times(center, k, x.V));
    expect_minimises({center, k, downhill, M}, state_after("precond_gated_deltanet norm_eps=0", x), x.seed);
  });
}

// ---- Gated DeltaNet-2

// Its online objective: |S - Diag(alpha) S_{t-1}|^2 / 2 - <S^T k, w v - (Diag(alpha) S_{t-1})^T (b k)>.
TEST(GatedDeltaNet2, TheStepMinimisesItsOnlineObjective) {
  for_each_step([](Step x) {
    Random random(x.seed);
    const size_t K = x.k.size();
    x.in.beta.clear();
    Vec center = x.S0, erased(K), written(x.V);
    const Vec k = 1 / norm(x.k) * x.k;
    for (size_t i = 0; i < K; ++i) {
      const double a = random.uniform(0.2, 1);
      x.in.g.push_back(std::log(a));
      x.in.erase_gate.push_back(random.uniform());
      erased[i] = x.in.erase_gate[i] * k[i];
      for (size_t j = 0; j < x.V; ++j) center[i * x.V + j] *= a;
    }
    for (size_t j = 0; j < x.V; ++j) {
      x.in.write_gate.push_back(random.uniform());
      written[j] = x.in.write_gate[j] * x.v[j];
    }
    const Vec pull = written - transposed_times(center, erased, x.V);
    expect_minimises({center, k, pull, Vec(K, 1.0)}, state_after("gated_deltanet2 norm_eps=0", x), x.seed);
  });
}

// ---- Q-Delta

Tokens random_qdelta_tokens(int64_t T, int64_t K, int64_t V, Random& random, bool decays) {
  Tokens x = random_tokens(T, K, V, random);
  for (int64_t t = 0; t < T; ++t) {
    const Vec q = 1 / norm(token(x.in.q, t, K)) * token(x.in.q, t, K);
    std::copy(q.begin(), q.end(), x.in.q.begin() + t * K);
    x.in.beta.push_back(random.uniform());
    x.in.lambda.push_back(random.uniform());
    if (decays) x.in.g.push_back(std::log(random.uniform(0.7, 1)));
  }
  return x;
}

// Eq. 12 (C.1): what a query reads is a mixture of the values written so far, sum_i gamma_i v_i. The weights depend on
// keys, queries and gates alone; here they are pulled back from the query, a token at a time.
TEST(Qdelta, AQueryReadsAMixtureOfTheValues) {
  Random random(3);
  for (const bool decays : {false, true}) {
    const Tokens x = random_qdelta_tokens(30, 6, 4, random, decays);
    const Vec query = normals(random, 6);
    Vec p = query, mixture(4, 0.0);
    for (int64_t t = x.T - 1; t >= 0; --t) {
      const Vec k = token(x.in.k, t, x.K), f = k + x.in.lambda[t] * token(x.in.q, t, x.K);
      const double weight = x.in.beta[t] * dot(p, k);
      mixture = mixture + weight * token(x.in.v, t, x.V);
      p = (decays ? std::exp(x.in.g[t]) : 1) * (p - weight * f);
    }
    const Vec read =
        transposed_times(run(decays ? "qdelta norm_eps=0" : "qdelta decay=none norm_eps=0", x).final_state, query, 4);
    EXPECT_LE(norm(read - mixture), kRounding * norm(mixture));
  }
}

// Theorem 3.2. With x = k + lambda q and the prediction p_t = (a_t S_{t-1})^T x_t the error after a token is e_t = v_t
// - S_t^T x_t. From token to token the target moves by dv = v_t - v_{t-1} and the prediction, before its write, by dp =
// p_t - S_{t-1}^T x_{t-1}; with r = dv - dp
//     |e_t| <= rho_t |e_{t-1}| + rho_t |r_t|,  rho_t = |1 - beta_t (1 + lambda_t k_t.q_t)| <= 1.
TEST(Qdelta, TheErrorFollowsTheMovementOfTargetAndPrediction) {
  Random random(5);
  for (const bool decays : {false, true}) {
    for (int sequence = 0; sequence < 10; ++sequence) {
      const int64_t K = 2 + sequence % 5, V = 3;
      const Tokens x = random_qdelta_tokens(40, K, V, random, decays);
      Step step;
      step.V = static_cast<size_t>(V);
      step.S0.assign(static_cast<size_t>(K * V), 0.0);
      Vec value(static_cast<size_t>(V), 0.0), read = value, error = value;  // of the token before: v, S^T x, v - S^T x
      for (int64_t t = 0; t < x.T; ++t) {
        step.q = token(x.in.q, t, K);
        step.k = token(x.in.k, t, K);
        step.v = token(x.in.v, t, V);
        step.in.beta = {x.in.beta[t]};
        step.in.lambda = {x.in.lambda[t]};
        if (decays) step.in.g = {x.in.g[t]};
        const Vec f = step.k + x.in.lambda[t] * step.q;
        const Vec predicted = (decays ? std::exp(x.in.g[t]) : 1) * transposed_times(step.S0, f, step.V);
        const Vec r = (step.v - value) - (predicted - read);
        step.S0 = state_after(decays ? "qdelta norm_eps=0" : "qdelta decay=none norm_eps=0", step);
        value = step.v;
        read = transposed_times(step.S0, f, step.V);
        const double rho = std::abs(1 - x.in.beta[t] * (1 + x.in.lambda[t] * dot(step.k, step.q)));
        EXPECT_LE(rho, 1 + kRounding);
        EXPECT_LE(norm(value - read), rho * (norm(error) + norm(r)) + kRounding);
        // The error itself, of which the bound is the triangle inequality.
        const double mu = 1 - x.in.beta[t] * dot(step.k, f);
        EXPECT_LE(norm(value - read - mu * (error + r)), 1e-12 * (1 + norm(error) + norm(r)));
        error = value - read;
      }
    }
  }
}

}  // namespace
}  // namespace fw
