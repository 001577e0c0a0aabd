// The time step softplus(x + bias) of a state-space layer and its log-decay.
#include <cmath>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct TimeStepOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols, 3.0), random_values(random, cols), random_values(random, cols)};
  }
  std::vector<bool> accumulates() const { return {false, true, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> dt(in[0].size()), g(in[0].size());
    for (size_t i = 0; i < dt.size(); ++i) {
      const size_t c = i % static_cast<size_t>(cols);
      dt[i] = std::log1p(std::exp(in[0][i] + in[2][c]));
      g[i] = -std::exp(in[1][c]) * dt[i];
    }
    return {dt, g};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]);
    Strided<T> dt(rows, cols), g(rows, cols);
    host_ops<T>().time_step_forward(host_exec<T>(), x.view(), in[1].data(), in[2].data(), dt.mat(), g.mat());
    return {dt.values(), g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols, in[0]), d_dt(rows, cols, douts[0]), dg(rows, cols, douts[1]);
    Strided<T> dx(rows, cols);
    std::vector<T> da_log = before[1], dbias = before[2];
    host_ops<T>().time_step_backward(host_exec<T>(), d_dt.view(), dg.view(), x.view(), in[1].data(), in[2].data(),
                                     dx.mat(), da_log.data(), dbias.data());
    return {dx.values(), da_log, dbias};
  }
};

TEST(TimeStep, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) check_op(TimeStepOp{rows, cols}, "time step");
  }
}

TEST(TimeStep, BitsDoNotDependOnThreads) { check_threads(TimeStepOp{3001, 65}, "time step"); }

// Far from 0 the step is its argument, or vanishes and stays positive.
TEST(TimeStep, FarFromZero) {
  const Values<float> y = TimeStepOp{1, 2}.forward<float>({{90.0F, -80.0F}, {0.0F, 0.0F}, {10.0F, 0.0F}});
  EXPECT_EQ(y[0][0], 100.0F);
  EXPECT_NEAR(y[0][1], 1.8048513e-35F, 1e-41F);
}

}  // namespace
}  // namespace fw::testing
