// What the papers prove about their steps, on the product's rules: Kaczmarz (projection, line search, contraction,
// proximal form), NLMS, Longhorn, EFLA, and the stability of the preconditioned step. Q-Delta has tracking_test.cpp.
#include <gtest/gtest.h>

#include <cmath>

#include "support/one_step.h"

namespace fw {
namespace {

using namespace testing;  // one_step.h's linear algebra

// Identities between a few products of numbers of size 1 to 10.
constexpr double kRounding = 1e-13;

// The keys of these rules are raw, so that the propositions are met for keys of any length.
const char* const kKaczmarz = "kaczmarz decay=none gain_eps=0";
const char* const kGate = "deltanet q_norm=raw k_norm=raw";  // the explicit gradient step of a given length
const char* const kLonghorn = "longhorn q_norm=raw k_norm=raw";

// f(S) = |S^T k - v|^2 / 2
double loss(const Step& x, const Vec& S) { return 0.5 * square(residual(x, S)); }

// df / dS = k (S^T k - v)^T
Vec gradient(const Step& x, const Vec& S) { return outer(x.k, residual(x, S)); }

// |S - S0|^2 + c |S^T k - v|^2
double proximal(const Step& x, double c, const Vec& S) { return square(S - x.S0) + c * square(residual(x, S)); }

// The unique minimiser of the proximal objective: its gradient is zero and every other point lies higher, by |D|^2 + c
// |D^T k|^2.
void expect_minimises_proximal(const Step& x, double c, const Vec& S) {
  const Vec slope = S - x.S0 + c * gradient(x, S);
  EXPECT_LE(std::sqrt(square(slope)), kRounding * (1 + c * square(x.k)) * (norm(S) + norm(x.S0) + norm(x.v)));
  Random random(x.seed);
  for (int i = 0; i < 5; ++i) {
    const Vec D = normals(random, x.S0.size());
    const double rise = square(D) + c * square(transposed_times(D, x.k, x.V));
    EXPECT_NEAR((proximal(x, c, S + D) - proximal(x, c, S)) / rise, 1, 1e-11);
  }
}

TEST(Kaczmarz, TheFullStepIsTheOrthogonalProjectionOntoTheSolutionsOfOneEquation) {
  for_each_step([](Step x) {
    x.in.beta = {1};
    const Vec S = state_after(kKaczmarz, x);
    EXPECT_LE(norm(residual(x, S)), kRounding * norm(residual(x, x.S0)) + kRounding * norm(x.v));
    // The change is orthogonal to every direction D that keeps S^T k = v, that is D^T k = 0: no other solution is
    // nearer.
    Random random(x.seed);
    for (int i = 0; i < 5; ++i) {
      const Vec any = normals(random, S.size());
      const Vec D = any - 1 / square(x.k) * outer(x.k, transposed_times(any, x.k, x.V));
      EXPECT_LE(std::abs(dot(S - x.S0, D)), kRounding * norm(S - x.S0) * norm(any));
      EXPECT_NEAR(square(S + D - x.S0), square(S - x.S0) + square(D), kRounding * square(S + any - x.S0));
    }
    // A projection: once more changes nothing.
    Step again = x;
    again.S0 = S;
    EXPECT_LE(relative_error(state_after(kKaczmarz, again), S), kRounding);
  });
}

// Along -grad f the loss is a parabola in the step; the Kaczmarz step with eta = 1 is where its slope is zero, and the
// relaxed step is the part eta of the way there. The steps of a given length are those of the rule whose gain is the
// gate itself.
TEST(Kaczmarz, TheStepIsTheExactLineSearch) {
  for_each_step([](Step x) {
    const double best = 1 / square(x.k);
    const auto gate_step = [&](double length) {
      Step y = x;
      y.in.beta = {length};
      return state_after(kGate, y);
    };
    Step full = x;
    full.in.beta = {1};
    const Vec S = state_after(kKaczmarz, full);
    EXPECT_LE(relative_error(S, gate_step(best)), kRounding);
    // the slope along the line
    EXPECT_LE(std::abs(dot(gradient(x, S), gradient(x, x.S0))), kRounding * square(gradient(x, x.S0)));
    for (const double factor : {-1.0, 0.0, 0.5, 0.9, 1.1, 2.0, 3.0})
      EXPECT_LT(loss(x, S), loss(x, gate_step(factor * best))) << factor;
    EXPECT_LE(relative_error(state_after(kKaczmarz, x), gate_step(x.in.beta[0] * best)), kRounding);
  });
}

// With eps: by 1 - eta |k|^2 / (|k|^2 + eps), also when the state decays first.
TEST(Kaczmarz, TheResidualContractsByOneMinusEta) {
  for_each_step([](const Step& x) {
    const Vec before = residual(x, x.S0);
    EXPECT_LE(relative_error(residual(x, state_after(kKaczmarz, x)), (1 - x.in.beta[0]) * before, norm(x.v)),
              kRounding);
    for (const double eps : {1e-6, 0.1, 1.0}) {
      const std::string rule = "kaczmarz gain_eps=" + std::to_string(eps);
      Step decayed = x;
      decayed.in.g = {-0.3};
      const double factor = 1 - x.in.beta[0] * square(x.k) / (square(x.k) + eps);
      const Vec expected = factor * residual(x, std::exp(-0.3) * x.S0);
      EXPECT_LE(relative_error(residual(x, state_after(rule, decayed)), expected, norm(x.v)), kRounding) << rule;
    }
  });
}

// Sum over steps: for data that one S* explains, |S_t - S*|^2 falls at every token, by eta (2 - eta) |residual|^2 /
// |k|^2 and no less, for every eta up to 2.
TEST(Kaczmarz, EveryStepComesNearerToAnySolution) {
  for_each_step([](const Step& x) {
    Random random(x.seed);
    const Vec target = normals(random, x.S0.size());
    for (const double eta : {0.3, 1.0, 1.9, 2.0}) {
      Step y = x;
      for (int t = 0; t < 10; ++t) {
        y.k = normals(random, x.k.size());
        y.v = transposed_times(target, y.k, y.V);
        y.in.beta = {eta};
        const Vec S = state_after("kaczmarz decay=none gain_eps=0 gain_bound=2", y);
        const double before = square(y.S0 - target), fall = eta * (2 - eta) * square(residual(y, y.S0)) / square(y.k);
        EXPECT_NEAR(square(S - target), before - fall, 1e-13 * (square(y.S0) + square(target)));
        y.S0 = S;
      }
    }
  });
}

// A gain s is the proximal step with c = s / (1 - s |k|^2): for Kaczmarz c = eta / ((1 - eta) |k|^2 + eps).
TEST(Kaczmarz, IsTheProximalStep) {
  for_each_step([](const Step& x) {
    const double eta = x.in.beta[0];
    expect_minimises_proximal(x, eta / ((1 - eta) * square(x.k)), state_after(kKaczmarz, x));
    Step full = x;  // with eta = 1 it is eps alone that keeps the state where it is
    full.in.beta = {1};
    expect_minimises_proximal(full, 1 / 0.25, state_after("kaczmarz decay=none gain_eps=0.25", full));
  });
}

TEST(Longhorn, IsTheProximalStepWithTheWeightBeta) {
  for_each_step([](Step x) {
    for (const double beta : {0.1, 1.0, 5.0}) {
      x.in.beta = {beta};
      expect_minimises_proximal(x, beta, state_after(kLonghorn, x));
    }
  });
}

TEST(Nlms, LeavesNoResidualButForEps) {
  for_each_step([](const Step& x) {
    const Vec before = residual(x, x.S0);
    Step y = x;
    y.in.beta.clear();
    EXPECT_LE(norm(residual(x, state_after("nlms gain_eps=0", y))), kRounding * (norm(before) + norm(x.v)));
    for (const double eps : {1e-6, 0.1}) {
      const Vec after = residual(x, state_after("nlms gain_eps=" + std::to_string(eps), y));
      EXPECT_LE(relative_error(after, eps / (square(x.k) + eps) * before, norm(x.v)), kRounding) << eps;
    }
  });
}

// dS/dtau = k (v - S^T k)^T for the time beta, by the classical method of Runge and Kutta in n steps. Along k this is
// y' = -|k|^2 y, for which a step of h = x / n, x = beta |k|^2, errs by h^5 / 120 at most: n of them by x (x / n)^4 /
// 120.
TEST(Efla, IsTheExactSolutionOfTheGradientFlow) {
  constexpr int kSteps = 1000;
  for_each_step([](Step x) {
    for (const double beta : {0.05, 0.5, 1.0}) {
      x.in.beta = {beta};
      const double h = beta / kSteps;
      Vec S = x.S0;
      for (int i = 0; i < kSteps; ++i) {
        const Vec a = -1.0 * gradient(x, S), b = -1.0 * gradient(x, S + h / 2 * a);
        const Vec c = -1.0 * gradient(x, S + h / 2 * b), d = -1.0 * gradient(x, S + h * c);
        S = S + h / 6 * (a + 2 * b + 2 * c + d);
      }
      const double z = beta * square(x.k), truncation = z * std::pow(z / kSteps, 4) / 120;
      const double start = norm(residual(x, x.S0)) / norm(x.k);  // |S - S0| if the flow ran for ever
      EXPECT_LE(norm(state_after("efla", x) - S), truncation * start + kSteps * 1e-16 * (norm(x.S0) + start));
    }
  });
}

// n steps of a rule with beta / n, the same key and value each time.
Vec split_steps(const std::string& rule, const Step& x, int n) {
  Step y = x;
  y.in.beta = {x.in.beta[0] / n};
  for (int i = 0; i < n; ++i) y.S0 = state_after(rule, y);
  return y.S0;
}

// What is left of the residual: of it explicit steps leave (1 - x/n)^n, the flow exp(-x), implicit ones (1 + x/n)^-n,
// in this order, x = beta |k|^2. Both meet the flow: exp(-x) (1 - x^2 / n) <= (1 - x/n)^n for x <= n, since
// exp(x) (1 - x/n)^n >= (1 - x^2/n^2)^n >= 1 - x^2/n. And (1 + x/n)^-n <= exp(-x) / (1 - x^2 / n) in the same way.
TEST(Efla, LiesBetweenManyDeltaStepsAndManyLonghornSteps) {
  for_each_step([](Step x) {
    x.in.beta = {2 / square(x.k)};
    const double start = norm(residual(x, x.S0)), z = 2, flow = norm(residual(x, state_after("efla", x))) / start;
    EXPECT_NEAR(flow, std::exp(-z), 1e-12);
    for (const int n : {8, 64}) {
      const double explicit_left = norm(residual(x, split_steps(kGate, x, n))) / start;
      const double implicit_left = norm(residual(x, split_steps(kLonghorn, x, n))) / start;
      EXPECT_LT(explicit_left, flow);
      EXPECT_LT(flow, implicit_left);
      EXPECT_GE(explicit_left, flow * (1 - z * z / n));
      EXPECT_LE(implicit_left, flow / (1 - z * z / n));
      // the flow of one time after another
      EXPECT_LE(relative_error(split_steps("efla", x, n), state_after("efla", x)), 1e-12);
    }
  });
}

// The transition of the preconditioned step is I - s (M k) k^T. On M k it is the number 1 - s k.(M k), elsewhere the
// identity.
struct Preconditioned {
  Vec key;            // M k
  double eigenvalue;  // as measured: what the step makes of the state (M k) y^T when there is nothing to write
};

Preconditioned measure(const std::string& rule, const Step& x) {
  const Vec y = x.v;
  Step write = x;  // from nothing, the step leaves s (M k) v^T
  write.S0.assign(x.S0.size(), 0.0);
  const Vec written = state_after(rule, write);
  Preconditioned result{Vec(x.k.size()), 0};
  for (size_t i = 0; i < x.k.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j) result.key[i] += written[i * y.size() + j] * y[j];
    result.key[i] /= x.in.beta[0] * square(y);
  }
  Step erase = x;
  erase.v.assign(y.size(), 0.0);
  erase.S0 = outer(result.key, y);
  const Vec erased = state_after(rule, erase);
  result.eigenvalue = dot(erased, erase.S0) / square(erase.S0);
  EXPECT_LE(norm(erased - result.eigenvalue * erase.S0), kRounding * norm(erase.S0));
  return result;
}

TEST(PreconditionedStep, EigenvaluesStayInTheUnitDisk) {
  for (const auto& limits : {std::pair{1.0, 1.5}, {1.0, 2.0}, {1.25, 1.6}, {2.0, 1.0}}) {
    const double bound = limits.first, reach = limits.second;
    const std::string rule =
        "precond_deltanet norm_eps=0 gain_bound=" + std::to_string(bound) + " precond_x=" + std::to_string(reach);
    for_each_step([&](Step x) {
      Random random(x.seed);
      x.in.precond_g = {-0.1};
      x.in.precond_beta = {random.uniform(0, 3)};
      x.in.precond_center = {random.uniform(-6, 6)};
      for (const double share : {0.2, 1.0}) {
        x.in.beta = {share * bound};
        const auto [key, eigenvalue] = measure(rule, x);
        const double expected = 1 - x.in.beta[0] * dot(key, x.k) / norm(x.k);
        EXPECT_NEAR(eigenvalue, expected, kRounding);
        EXPECT_LE(std::abs(eigenvalue), 1 + kRounding) << rule;
        EXPECT_LE(eigenvalue, 1 - x.in.beta[0] / reach + kRounding) << rule;  // M >= 1 / x: something is always learned
        // I - s M k k^T = M^(1/2) (I - s k' k'^T) M^(-1/2) with k' = M^(1/2) k: in the norm of M^-1 no state grows.
        Step erase = x;
        erase.v.assign(x.v.size(), 0.0);
        const Vec after = state_after(rule, erase);
        double grown = 0, start = 0;
        for (size_t i = 0; i < after.size(); ++i) {
          const size_t row = i / x.v.size();
          const double m = key[row] * norm(x.k) / x.k[row];
          grown += after[i] * after[i] / m;
          start += x.S0[i] * x.S0[i] / m;
        }
        EXPECT_LE(grown, start * (1 + 1e-12)) << rule;
      }
    });
  }
}

// The gain is at its bound, a key lies along one axis and a preconditioner is at the end of its range. The eigenvalue
// is then -1 but for the 1 / |log A - center| that the range is never reached by. So the condition gain x <= 2 cannot
// be weaker.
TEST(PreconditionedStep, TheConditionIsSharp) {
  const double far = 1e7;
  for (const auto& [bound, reach] : {std::pair{1.0, 2.0}, {1.25, 1.6}, {2.0, 1.0}}) {
    Step x = random_step(4, 3, 1);
    x.k = {0, 2, 0, 0};
    x.in.beta = {bound};
    x.in.precond_g = {0};
    x.in.precond_beta = {1};
    x.in.precond_center = {far};
    const std::string rule =
        "precond_deltanet norm_eps=0 gain_bound=" + std::to_string(bound) + " precond_x=" + std::to_string(reach);
    const double eigenvalue = measure(rule, x).eigenvalue;
    EXPECT_GE(eigenvalue, -1 - kRounding);
    EXPECT_LE(eigenvalue, -1 + 2 * std::log(reach) / far + kRounding);
  }
}

}  // namespace
}  // namespace fw
