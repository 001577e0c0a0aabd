// softplus: log(1 + exp(x)), its gradient from its value, and what is far from 0.
#include <cmath>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct SoftplusOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const { return {random_values(random, rows * cols, 4.0)}; }
  std::vector<bool> accumulates() const { return {false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y;
    y.reserve(in[0].size());
    for (const double x : in[0]) y.push_back(std::log1p(std::exp(x)));
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> x(rows, cols, in[0]);
    host_ops<T>().softplus_forward(host_exec<T>(), x.view(), x.mat());  // in place
    return {x.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> y(rows, cols, forward(in)[0]);
    Strided<T> dy(rows, cols, douts[0]);
    host_ops<T>().softplus_backward(host_exec<T>(), dy.view(), y.view(), dy.mat());
    return {dy.values()};
  }
};

TEST(Softplus, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) check_op(SoftplusOp{rows, cols}, "softplus");
  }
}

TEST(Softplus, BitsDoNotDependOnThreads) { check_threads(SoftplusOp{3001, 65}, "softplus"); }

// Small values keep their digits, and so do their gradients.
TEST(Softplus, FarFromZero) {
  const SoftplusOp op{1, 2};
  const Values<float> y = op.forward<float>({{100.0F, -80.0F}});
  EXPECT_EQ(y[0][0], 100.0F);
  EXPECT_NEAR(y[0][1], 1.8048513e-35F, 1e-41F);
  const Values<float> dx = op.backward<float>({{100.0F, -80.0F}}, {{1.0F, 1.0F}}, {});
  EXPECT_EQ(dx[0][0], 1.0F);
  EXPECT_NEAR(dx[0][1], 1.8048513e-35F, 1e-41F);
}

}  // namespace
}  // namespace fw::testing
