// The solve of a Mesa layer, exact and by conjugate gradients, against the normal equations it stands for; unit
// vectors; sums of rows.
#include <cmath>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct L2NormOp {
  int64_t rows, heads, dim;

  Values<double> inputs(Random& random) const { return {random_values(random, rows * heads * dim)}; }
  std::vector<bool> accumulates() const { return {false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t first = 0; first < y.size(); first += static_cast<size_t>(dim)) {
      double square = 1e-2;
      for (int64_t i = 0; i < dim; ++i) square += in[0][first + i] * in[0][first + i];
      for (int64_t i = 0; i < dim; ++i) y[first + i] = in[0][first + i] / std::sqrt(square);
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, heads * dim, in[0]);
    Strided<T> y(rows, heads * dim);
    host_ops<T>().l2_norm_forward(host_exec<T>(), x.view(), dim, T(1e-2), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> x(rows, heads * dim, in[0]), dy(rows, heads * dim, douts[0]);
    Strided<T> dx(rows, heads * dim);
    host_ops<T>().l2_norm_backward(host_exec<T>(), dy.view(), x.view(), dim, T(1e-2), dx.mat());
    return {dx.values()};
  }
};

TEST(L2Norm, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t dim : {1, 7, 16}) check_op(L2NormOp{rows, 3, dim}, "l2 norm");
  }
}

TEST(L2Norm, BitsDoNotDependOnThreads) { check_threads(L2NormOp{3001, 3, 16}, "l2 norm"); }

// Two sequences, one with a state to begin with.
class MesaSolve : public ::testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kHeads = 2, kK = 6, kV = 3, kTokens = 23;
  const SeqLayout layout_{{0, 9, 9, kTokens}};
  Random random_{4};
  std::vector<double> rhs_ = random_values(random_, kTokens*kHeads*kK), k_ = random_values(random_, kTokens*kHeads*kK),
                      beta_ = random_values(random_, kTokens*kHeads), g_ = random_values(random_, kTokens*kHeads),
                      lambda_ = random_values(random_, kHeads*kK),
                      state_ = std::vector<double>(static_cast<size_t>(3 * kHeads * kK * (kV + kK)), 0.0),
                      x_ = std::vector<double>(rhs_.size());

  void SetUp() override {
    for (double& b : beta_) b = 1 / (1 + std::exp(-b));
    for (double& g : g_) g = -std::abs(g);
    // H of the last sequence: something positive.
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kK; ++i) H0(h, i, i) = 0.5 + static_cast<double>(i);
    }
  }
  double& H0(int64_t h, int64_t i, int64_t j) {
    return state_[static_cast<size_t>((((2 * kHeads + h) * kK + i) * (kV + kK)) + kV + j)];
  }
  void solve(int64_t cg_steps) {
    const MesaShape shape{kHeads, kK, kV, 0.25, cg_steps, 1e-13};
    const int64_t width = kHeads * kK;
    host_ops<double>().mesa_solve(host_exec<double>(), shape, {rhs_.data(), kTokens, width},
                                  {k_.data(), kTokens, width}, {beta_.data(), kTokens, kHeads},
                                  {g_.data(), kTokens, kHeads}, lambda_.data(), layout_, state_.data(),
                                  {x_.data(), kTokens, width});
  }
};

// (H + Lambda) x - rhs, H summed from its definition.
TEST_P(MesaSolve, SolvesTheNormalEquations) {
  solve(GetParam());
  for (int64_t n = 0; n < layout_.count(); ++n) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = layout_.begin(n); t < layout_.end(n); ++t) {
        for (int64_t i = 0; i < kK; ++i) {
          double left = 0, decay = 1;
          for (int64_t s = t; s >= layout_.begin(n); --s) {
            double dot = 0;
            for (int64_t j = 0; j < kK; ++j)
              dot += k_[static_cast<size_t>((s * kHeads + h) * kK + j)] *
                     x_[static_cast<size_t>((t * kHeads + h) * kK + j)];
            left += decay * beta_[static_cast<size_t>(s * kHeads + h)] *
                    k_[static_cast<size_t>((s * kHeads + h) * kK + i)] * dot;
            decay *= std::exp(g_[static_cast<size_t>(s * kHeads + h)]);
          }
          const double x = x_[static_cast<size_t>((t * kHeads + h) * kK + i)];
          if (n == 2) left += decay * H0(h, i, i) * x;
          left += (std::log1p(std::exp(lambda_[static_cast<size_t>(h * kK + i)])) + 0.25) * x;
          EXPECT_NEAR(left, rhs_[static_cast<size_t>((t * kHeads + h) * kK + i)], 1e-11);
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Solvers, MesaSolve, ::testing::Values(0, 60));

// Few steps end before the solution, where the stopping rule says.
TEST_F(MesaSolve, FewStepsAreAnApproximation) {
  solve(0);
  const std::vector<double> exact = x_;
  double before = 1;
  for (int64_t steps : {1, 3, 6}) {
    solve(steps);
    double error = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) error += std::pow(x_[i] - exact[i], 2), norm += exact[i] * exact[i];
    error = std::sqrt(error / norm);
    EXPECT_LT(error, before);
    before = error;
  }
  EXPECT_LT(before, 1e-10);  // as many steps as channels
}

// dlambda against differences of sum(x c), whose y is the solve for c.
TEST_F(MesaSolve, GradientOfLambda) {
  solve(0);
  const std::vector<double> x = x_, c = random_values(random_, kTokens * kHeads * kK), rhs = rhs_;
  rhs_ = c;
  solve(0);
  const std::vector<double> y = x_;
  rhs_ = rhs;
  std::vector<double> dlambda(lambda_.size(), 0.5);
  const int64_t width = kHeads * kK;
  host_ops<double>().mesa_lambda_backward(host_exec<double>(), {x.data(), kTokens, width}, {y.data(), kTokens, width},
                                          lambda_.data(), dlambda.data());
  const auto value = [&] {
    solve(0);
    double sum = 0;
    for (size_t i = 0; i < c.size(); ++i) sum += c[i] * x_[i];
    return sum;
  };
  for (size_t i = 0; i < lambda_.size(); ++i) {
    const double at = lambda_[i], h = 1e-5;
    lambda_[i] = at + h;
    const double up = value();
    lambda_[i] = at - h;
    const double down = value();
    lambda_[i] = at;
    EXPECT_NEAR(dlambda[i] - 0.5, (up - down) / (2 * h), 1e-7);
  }
}

TEST(Rows, SumsAndDifferences) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  std::vector<float> b = {10, 20, 30, 40, 50, 60};
  host_ops<float>().add_rows(host_exec<float>(), {a.data(), 2, 2, 3}, {b.data(), 2, 2, 3});
  EXPECT_EQ(b, (std::vector<float>{11, 22, 30, 44, 55, 60}));
  host_ops<float>().subtract_rows(host_exec<float>(), {a.data(), 2, 2, 3}, {b.data(), 2, 2, 3});
  EXPECT_EQ(b, (std::vector<float>{10, 20, 30, 40, 50, 60}));
}

}  // namespace
}  // namespace fw::testing
