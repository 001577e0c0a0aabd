// The reference of Mamba-3's recurrence: its gradients against central differences, and what it reduces to.
#include "reference/mamba3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/comparison.h"

namespace fw::testing {
namespace {

double sum_of(const Mamba3Problem& problem, const Mamba3Problem::Inputs& in, const Mamba3Problem::Outputs& d) {
  const Mamba3Problem::Outputs out = problem.forward(in);
  double sum = 0;
  for (size_t i = 0; i < d.y.size(); ++i) sum += out.y[i] * d.y[i];
  for (size_t i = 0; i < d.s.size(); ++i) sum += out.s[i] * d.s[i];
  return sum;
}

TEST(Mamba3Reference, GradientsEqualCentralDifferences) {
  for (const Mamba3Problem& problem : {Mamba3Problem{2, 1, 5, 3, 1, 2, false, SeqLayout({0, 4, 4, 5})},
                                       Mamba3Problem{4, 2, 4, 3, 2, 2, true, SeqLayout({0, 3})}}) {
    Mamba3Problem::Inputs in = problem.random(1);
    const Mamba3Problem::Outputs d = problem.random_cotangents(2);
    const Mamba3Problem::Inputs got = problem.backward(in, d);
    const auto check = [&](const char* name, std::vector<double> Mamba3Problem::Inputs::*field) {
      std::vector<double> expected;
      for (double& x : in.*field) {
        const double before = x, h = 1e-3;
        const auto at = [&](double offset) {
          x = before + offset;
          return sum_of(problem, in, d);
        };
        expected.push_back((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
        x = before;
      }
      EXPECT_LE(relative_error(got.*field, expected), 1e-9) << name << ", rank " << problem.rank;
    };
    using In = Mamba3Problem::Inputs;
    check("q", &In::q);
    check("k", &In::k);
    check("v", &In::v);
    check("dt", &In::dt);
    check("trap", &In::trap);
    check("g", &In::g);
    check("angle", &In::angle);
    check("q_bias", &In::q_bias);
    check("k_bias", &In::k_bias);
    check("s", &In::s);
    check("k_last", &In::k_last);
    check("v_last", &In::v_last);
    check("theta", &In::theta);
  }
}

// With lam = 1, no turns and one row it is Mamba-2: S = exp(g) S + dt k v^T.
TEST(Mamba3Reference, ReducesToMamba2) {
  const Mamba3Problem problem{1, 1, 3, 2, 1, 1, false, SeqLayout({0, 6})};
  Mamba3Problem::Inputs in = problem.random(3);
  for (double& x : in.trap) x = 40;
  for (double& x : in.angle) x = 0;
  for (double& x : in.theta) x = 0;
  std::vector<double> s = in.s, y;
  for (size_t t = 0; t < 6; ++t) {
    for (size_t c = 0; c < 3; ++c) {
      for (size_t p = 0; p < 2; ++p)
        s[c * 2 + p] = std::exp(in.g[t]) * s[c * 2 + p] + in.dt[t] * (in.k[t * 3 + c] + in.k_bias[c]) * in.v[t * 2 + p];
    }
    for (size_t p = 0; p < 2; ++p) {
      double sum = 0;
      for (size_t c = 0; c < 3; ++c) sum += s[c * 2 + p] * (in.q[t * 3 + c] + in.q_bias[c]);
      y.push_back(sum);
    }
  }
  EXPECT_LE(relative_error(problem.forward(in).y, y), 1e-13);
  EXPECT_LE(relative_error(problem.forward(in).s, s), 1e-13);
}

}  // namespace
}  // namespace fw::testing
