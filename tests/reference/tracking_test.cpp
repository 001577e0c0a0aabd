// Q-Delta: how its step contracts, and how its state follows a target that moves. What is proved here, from the
// recurrence alone, for unit keys and queries (q_norm = k_norm = l2), c = q.k, the erase direction f = k + lambda q,
// the decay a:
//     S_t = a S_{t-1} - beta k (a f^T S_{t-1} - v^T) = M a S_{t-1} + beta k v^T,   M = I - beta k f^T.
//
// 1. Residual and eigenvalues. f^T M = (1 - beta k.f) f^T, so that the residual of what is retrieved with f is
//    multiplied by mu = 1 - beta (1 + lambda c)
//    exactly. M has the eigenvector k with mu, and is the identity on all that is orthogonal to f. |mu| <= 1 if and
//    only if 0 <= beta (1 + lambda c) <= 2; for beta, lambda in [0, 1] always, since |c| <= 1, with mu = -1 for beta =
//    lambda = c = 1. With lambda = 0 this is the delta rule's beta <= 2; beta = 2 meets it only where lambda c <= 0.
// 2. Norm. Write q = c k + s p with a unit p orthogonal to k, s^2 = 1 - c^2, and d = beta lambda s. On span(k, p) M is
//    [[mu, -d], [0, 1]], elsewhere 1. So |M|_2 = nu, the larger root of
//        x^4 - (1 + mu^2 + d^2) x^2 + mu^2 = 0.
//    At x = 1 the left side is -d^2: nu >= 1, and nu = 1 only if d = 0 (for |mu| <= 1). What the step retrieves
//    contracts (1.), but the state may grow, which it cannot with the delta rule. By how much, for beta, lambda in [0,
//    1]: M is affine in beta and in lambda, so its norm is convex in each; it is 1 for beta lambda = 0 and sqrt(1 + s)
//    for beta = lambda = 1. Hence 1 <= nu <= 1 + beta lambda (sqrt(1 + s) - 1) <= sqrt(2).
// 3. Tracking. Let v_t = X_t^T f_t + n_t for targets X_t with noise n_t; let D_t = S_t - X_t and m_t = X_t - a_t
//    X_{t-1}, what the target moves beyond the decay. Subtract X_t = M X_t + beta k f^T X_t from the recurrence:
//        D_t = M_t (a_t D_{t-1} - m_t) + beta_t k_t n_t^T,
//    Hence |D_t|_F <= nu_t (a_t |D_{t-1}|_F + |m_t|_F) + beta_t |n_t|.
//    If a_t nu_t <= rho < 1 and nu_t |m_t| + beta_t |n_t| <= b:
//        |D_t|_F <= rho^t |D_0|_F + b (1 - rho^t) / (1 - rho).
//    By 2. that holds for every a_t <= rho / sqrt(2), whatever queries, keys and gates are. Without a decay no such
//    bound can hold, even for the delta rule, because M is the identity on what is orthogonal to f.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/one_step.h"

namespace fw {
namespace {

using namespace testing;  // one_step.h's linear algebra

constexpr double kRounding = 1e-13;
const char* const kQdelta = "qdelta decay=none norm_eps=0";
const char* const kDecayedQdelta = "qdelta norm_eps=0";

// The numbers of one token.
struct Numbers {
  Vec k, q, f;
  double beta, lambda, c, s, mu, d, nu;
};

Numbers numbers(const Step& x) {
  Numbers n;
  n.k = 1 / norm(x.k) * x.k;
  n.q = 1 / norm(x.q) * x.q;
  n.beta = x.in.beta[0];
  n.lambda = x.in.lambda[0];
  n.f = n.k + n.lambda * n.q;
  n.c = dot(n.k, n.q);
  n.mu = 1 - n.beta * (1 + n.lambda * n.c);
  n.s = norm(n.q - n.c * n.k);
  n.d = n.beta * n.lambda * n.s;
  const double trace = 1 + n.mu * n.mu + n.d * n.d;
  // (trace - 2 |mu|) (trace + 2 |mu|) as sums of squares: nothing cancels where mu is near 1.
  const double low = (1 - std::abs(n.mu)) * (1 - std::abs(n.mu)) + n.d * n.d,
               high = (1 + std::abs(n.mu)) * (1 + std::abs(n.mu)) + n.d * n.d;
  n.nu = std::sqrt((trace + std::sqrt(low * high)) / 2);
  return n;
}

// Random steps with every beta and lambda of the rule, their ends, and queries from -k over all directions to k.
template <class Body>
void for_each_qdelta_step(Body&& body) {
  for_each_step([&](Step x) {
    Random random(x.seed);
    for (int i = 0; i < 24; ++i) {
      x.in.beta = {i % 4 == 0 ? 1.0 : random.uniform()};
      x.in.lambda = {i % 3 == 0 ? 1.0 : i % 3 == 1 ? 0.0 : random.uniform()};
      x.q = random.uniform(-3, 3) * x.k + random.uniform(0, 2) * normals(random, x.k.size());
      if (i == 0) x.q = x.k;
      if (i == 12) x.q = -1.0 * x.k;
      body(x);
    }
  });
}

// S^T f - v
Vec retrieval_residual(const Step& x, const Vec& f, const Vec& S) { return transposed_times(S, f, x.V) - x.v; }

Step nothing_to_write(Step x) {
  x.v.assign(x.v.size(), 0.0);
  return x;
}

TEST(Qdelta, TheResidualOfTheRetrievalIsMultipliedByMuWithinTheUnitDisk) {
  for_each_qdelta_step([](const Step& x) {
    const Numbers n = numbers(x);
    EXPECT_LE(std::abs(n.mu), 1 + kRounding);
    const Vec before = retrieval_residual(x, n.f, x.S0), after = retrieval_residual(x, n.f, state_after(kQdelta, x));
    EXPECT_LE(norm(after - n.mu * before), kRounding * (norm(before) + norm(x.v) + norm(x.S0)));
  });
}

TEST(Qdelta, TheEigenvaluesOfTheStepAreMuAndOne) {
  for_each_qdelta_step([](Step x) {
    x = nothing_to_write(x);
    const Numbers n = numbers(x);
    Random random(x.seed);
    const Vec y = normals(random, x.V);
    const Vec start = x.S0;
    x.S0 = outer(n.k, y);
    EXPECT_LE(norm(state_after(kQdelta, x) - n.mu * x.S0), kRounding * norm(x.S0));
    if (square(n.f) < 1e-3) return;  // q = -k: f is zero, and so is what is erased
    x.S0 = start - 1 / square(n.f) * outer(n.f, transposed_times(start, n.f, x.V));
    EXPECT_LE(norm(state_after(kQdelta, x) - x.S0), kRounding * norm(start));
  });
}

// The condition on beta (1 + lambda c) is sharp: at 2 the residual turns its sign and keeps its size, above it grows.
TEST(Qdelta, TheResidualGrowsBeyondTheCondition) {
  for_each_step([](Step x) {
    x.q = x.k;
    x.in.lambda = {1};
    const auto growth = [&](double beta) {
      x.in.beta = {beta};
      const Numbers n = numbers(x);
      return norm(retrieval_residual(x, n.f, state_after("qdelta decay=none norm_eps=0 gain_bound=2", x))) /
             norm(retrieval_residual(x, n.f, x.S0));
    };
    EXPECT_NEAR(growth(0.5), 0, 1e-12);
    EXPECT_NEAR(growth(1), 1, 1e-12);
    EXPECT_NEAR(growth(1.1), 1.2, 1e-12);
    EXPECT_NEAR(growth(2), 3, 1e-12);
  });
}

TEST(Qdelta, TheStepGrowsNoStateByMoreThanItsNormAndOneByExactlyIt) {
  for_each_qdelta_step([](Step x) {
    x = nothing_to_write(x);
    const Numbers n = numbers(x);
    EXPECT_LE(norm(state_after(kQdelta, x)), n.nu * norm(x.S0) * (1 + kRounding));
    EXPECT_GE(n.nu, 1 - kRounding);
    const double corner = std::sqrt(1 + n.s);
    EXPECT_LE(n.nu, 1 + n.beta * n.lambda * (corner - 1) + kRounding);
    if (n.beta == 1 && n.lambda == 1) {
      EXPECT_NEAR(n.nu, corner, kRounding);
    }
    if (n.d < 1e-3) return;
    // M^T M on (k, p) is [[mu^2, -mu d], [-mu d, 1 + d^2]], for nu^2 with the eigenvector (-mu d, nu^2 - mu^2).
    const Vec orthogonal = n.q - n.c * n.k;
    const Vec top = -n.mu * n.d * n.k + (n.nu * n.nu - n.mu * n.mu) / norm(orthogonal) * orthogonal;
    x.S0 = outer(top, Vec(x.V, 1.0));
    EXPECT_NEAR(norm(state_after(kQdelta, x)) / norm(x.S0), n.nu, 1e-12);
    EXPECT_GT(n.nu, 1);
  });
}

struct Track {
  double drift, noise;
  uint64_t seed;
};

// Runs 60 tokens and checks the inequality of one token at each, and the geometric bound of all before.
void expect_tracks(const Track& track) {
  Random random(track.seed);
  Step x = random_step(2 + static_cast<int64_t>(track.seed % 5), 3, track.seed);
  Vec target = normals(random, x.S0.size());
  double rho = 0, b = 0, distance = norm(x.S0 - target);
  const double start = distance;
  for (int t = 1; t <= 60; ++t) {
    x.q = normals(random, x.k.size());
    x.k = normals(random, x.k.size());
    const double a = random.uniform(0.5, 0.7);
    x.in.g = {std::log(a)};
    x.in.beta = {random.uniform()};
    x.in.lambda = {random.uniform()};
    const Numbers n = numbers(x);
    const Vec before = target;
    target = a * target + track.drift * normals(random, target.size());
    const Vec noise = track.noise * normals(random, x.V);
    x.v = transposed_times(target, n.f, x.V) + noise;
    x.S0 = state_after(kDecayedQdelta, x);
    const double moved = norm(target - a * before), now = norm(x.S0 - target);
    EXPECT_LE(now, (n.nu * (a * distance + moved) + n.beta * norm(noise)) * (1 + 1e-12) + 1e-13);
    distance = now;
    // The sum over tokens, with the worst of all that came so far.
    rho = std::max(rho, a * n.nu);
    b = std::max(b, n.nu * moved + n.beta * norm(noise));
    ASSERT_LT(rho, 1);
    EXPECT_LE(distance, (std::pow(rho, t) * start + b * (1 - std::pow(rho, t)) / (1 - rho)) * (1 + 1e-12) + 1e-13);
  }
}

TEST(Qdelta, TheStateFollowsItsTarget) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    for (const double drift : {0.0, 0.3}) {
      for (const double noise : {0.0, 0.5}) expect_tracks({drift, noise, seed});
    }
  }
}

// The boundary of the tracking bound, where every inequality of its proof is an equality: the decayed error and the
// movement of the target point along the direction that the step grows most.
TEST(Qdelta, TheTrackingBoundIsAttained) {
  for_each_qdelta_step([](Step x) {
    const Numbers n = numbers(x);
    if (n.d < 1e-3) return;
    const double a = 0.8;
    x.in.g = {std::log(a)};
    const Vec orthogonal = n.q - n.c * n.k;
    const Vec top = -n.mu * n.d * n.k + (n.nu * n.nu - n.mu * n.mu) / norm(orthogonal) * orthogonal;
    const Vec D = outer(top, Vec(x.V, 1.0));
    const Vec before = x.S0, target = a * before - 0.5 * D;
    x.S0 = before + D;
    x.v = transposed_times(target, n.f, x.V);
    EXPECT_NEAR(norm(state_after(kDecayedQdelta, x) - target), n.nu * (a * norm(D) + 0.5 * norm(D)),
                1e-12 * (norm(D) + norm(target)));
  });
}

}  // namespace
}  // namespace fw
