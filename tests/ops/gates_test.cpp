// The elementwise gates: sigmoid, log-decay, SwiGLU; at moderate values against their formulas and at extreme ones.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

struct SwigluOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols, 2.0), random_values(random, rows * cols)};
  }
  std::vector<bool> accumulates() const { return {false, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = in[0][i] * sigmoid(in[0][i]) * in[1][i];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> gate(rows, cols, in[0]);
    const Strided<T> up(rows, cols, in[1]);
    Strided<T> y(rows, cols);
    host_ops<T>().swiglu_forward(host_exec<T>(), gate.view(), up.view(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    Strided<T> gate(rows, cols, in[0]);
    Strided<T> up(rows, cols, in[1]);
    const Strided<T> dy(rows, cols, douts[0]);
    Strided<T> dgate(rows, cols);
    Strided<T> dup(rows, cols);
    host_ops<T>().swiglu_backward(host_exec<T>(), dy.view(), gate.view(), up.view(), dgate.mat(), dup.mat());
    host_ops<T>().swiglu_backward(host_exec<T>(), dy.view(), gate.view(), up.view(), gate.mat(), up.mat());
    EXPECT_TRUE(same_bits<T>({gate.values(), up.values()}, {dgate.values(), dup.values()})) << "in place differs";
    return {dgate.values(), dup.values()};
  }
};

TEST(Swiglu, ValuesAndGradients) {
  for (int64_t cols : {1, 7, 24, 65}) check_op(SwigluOp{4, cols}, "swiglu " + std::to_string(cols));
}

TEST(Swiglu, BitsDoNotDependOnThreads) { check_threads(SwigluOp{2000, 65}, "swiglu"); }

struct SigmoidOp {
  int64_t rows, cols;
  double scale;
  bool bias;

  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows * cols, 3.0), random_values(random, 1)};
    if (!bias) in[1].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = scale * sigmoid(in[0][i] + (bias ? in[1][0] : 0.0));
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> x(rows, cols, in[0]);
    Strided<T> y(rows, cols);
    const T* b = bias ? in[1].data() : nullptr;
    host_ops<T>().sigmoid_gate_forward(host_exec<T>(), x.view(), b, T(scale), y.mat());
    host_ops<T>().sigmoid_gate_forward(host_exec<T>(), x.view(), b, T(scale), x.mat());
    EXPECT_TRUE(same_bits<T>({x.values()}, {y.values()})) << "in place differs";
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> y(rows, cols, forward<T>(in)[0]);
    Strided<T> dy(rows, cols, douts[0]);
    Strided<T> dx(rows, cols);
    std::vector<T> dbias = before[1];
    T other = 0;
    host_ops<T>().sigmoid_gate_backward(host_exec<T>(), dy.view(), y.view(), T(scale), dx.mat(),
                                        bias ? dbias.data() : nullptr);
    host_ops<T>().sigmoid_gate_backward(host_exec<T>(), dy.view(), y.view(), T(scale), dy.mat(), &other);
    EXPECT_TRUE(same_bits<T>({dx.values()}, {dy.values()})) << "in place differs";
    return {dx.values(), dbias};
  }
};

TEST(SigmoidGate, ValuesAndGradients) {
  for (int64_t cols : {1, 3, 7, 24, 65}) {
    for (double scale : {1.0, 2.0}) {
      for (bool bias : {false, true}) check_op(SigmoidOp{5, cols, scale, bias}, "sigmoid gate " + std::to_string(cols));
    }
  }
}

TEST(SigmoidGate, BitsDoNotDependOnThreads) { check_threads(SigmoidOp{9000, 3, 1.0, true}, "sigmoid gate"); }

// sigmoid and 1 - sigmoid keep their relative accuracy far out on the negative side, and nothing overflows.
template <class T>
void check_sigmoid_range(double tolerance) {
  std::vector<T> x;
  for (double v = -80; v <= 80; v += 0.37) x.push_back(static_cast<T>(v));
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<T> y(x.size());
  host_ops<T>().sigmoid_gate_forward(host_exec<T>(), {x.data(), 1, n}, nullptr, T(1), {y.data(), 1, n});
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = sigmoid(static_cast<double>(x[i]));
    EXPECT_NEAR(static_cast<double>(y[i]) / want, 1.0, tolerance) << "at " << x[i];
  }
}

TEST(SigmoidGate, AccurateOverTheWholeRange) {
  check_sigmoid_range<double>(1e-14);
  check_sigmoid_range<float>(1e-6);
}

TEST(SigmoidGate, ExtremesAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<float> x{-1e30F, static_cast<float>(-inf), 1e30F, static_cast<float>(inf),
                             std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> y(x.size());
  host_ops<float>().sigmoid_gate_forward(host_exec<float>(), {x.data(), 1, 5}, nullptr, 1.0F, {y.data(), 1, 5});
  EXPECT_EQ(y[0], 0.0F);
  EXPECT_EQ(y[1], 0.0F);
  EXPECT_EQ(y[2], 1.0F);
  EXPECT_EQ(y[3], 1.0F);
  EXPECT_TRUE(std::isnan(y[4])) << "NaN must not be hidden: training skips such a step";
}

struct DecayOp {
  int64_t rows, cols, group;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols, 2.0), random_values(random, cols / group), random_values(random, cols)};
  }
  std::vector<bool> accumulates() const { return {false, true, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> g(in[0].size());
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t c = i % static_cast<size_t>(cols);
      g[i] = -std::exp(in[1][c / static_cast<size_t>(group)]) * softplus(in[0][i] + in[2][c]);
    }
    return {g};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]);
    Strided<T> g(rows, cols);
    host_ops<T>().decay_gate_forward(host_exec<T>(), x.view(), in[1].data(), in[2].data(), group, g.mat());
    return {g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols, in[0]);
    const Strided<T> dg(rows, cols, douts[0]);
    Strided<T> dx(rows, cols);
    std::vector<T> da = before[1];
    std::vector<T> ddt = before[2];
    host_ops<T>().decay_gate_backward(host_exec<T>(), dg.view(), x.view(), in[1].data(), in[2].data(), group, dx.mat(),
                                      da.data(), ddt.data());
    return {dx.values(), da, ddt};
  }
};

TEST(DecayGate, ValuesAndGradients) {
  for (const auto& [cols, group] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 1}, {14, 7}, {24, 8}, {65, 13}, {192, 64}}) {
    check_op(DecayOp{4, cols, group}, "decay gate " + std::to_string(cols) + " by " + std::to_string(group));
  }
}

TEST(DecayGate, BitsDoNotDependOnThreads) { check_threads(DecayOp{2000, 64, 16}, "decay gate"); }

TEST(DecayGate, TinyRatesKeepTheirRelativeAccuracy) {
  const std::vector<double> x{-30, -20, -5, 0, 5, 30, 800};
  const std::vector<double> zeros(x.size(), 0.0);
  std::vector<double> g(x.size());
  const int64_t n = static_cast<int64_t>(x.size());
  host_ops<double>().decay_gate_forward(host_exec<double>(), {x.data(), 1, n}, zeros.data(), zeros.data(), 1,
                                        {g.data(), 1, n});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(g[i] / -softplus(x[i]), 1.0, 1e-14) << "at " << x[i];
}

TEST(DecayGate, ExtremesAndNan) {
  const std::vector<float> x{-1e30F, -200.0F, 1e30F, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<float> zeros(4, 0.0F);
  const std::vector<float> ones(4, 1.0F);
  std::vector<float> g(4);
  std::vector<float> dx(4);
  std::vector<float> da(4, 0.0F);
  std::vector<float> ddt(4, 0.0F);
  host_ops<float>().decay_gate_forward(host_exec<float>(), {x.data(), 1, 4}, zeros.data(), zeros.data(), 1,
                                       {g.data(), 1, 4});
  host_ops<float>().decay_gate_backward(host_exec<float>(), {ones.data(), 1, 4}, {x.data(), 1, 4}, zeros.data(),
                                        zeros.data(), 1, {dx.data(), 1, 4}, da.data(), ddt.data());
  EXPECT_EQ(g[0], 0.0F);
  EXPECT_EQ(g[1], 0.0F);
  EXPECT_EQ(g[2], -1e30F);
  EXPECT_TRUE(std::isnan(g[3]));
  EXPECT_EQ(dx[0], 0.0F);
  EXPECT_EQ(dx[2], -1.0F);
  EXPECT_TRUE(std::isnan(dx[3]));
}

}  // namespace
}  // namespace fw::testing
