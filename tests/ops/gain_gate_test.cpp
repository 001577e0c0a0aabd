// The gates of nn/gain.h and the log-sigmoid decay, at moderate values against their formulas and where digits run out.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

std::string shape(int64_t rows, int64_t cols) { return std::to_string(rows) + " x " + std::to_string(cols); }

struct LogSigmoidDecayOp {
  int64_t rows, cols;
  double scale;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols, 2.0), random_values(random, cols)};
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> g(in[0].size());
    for (size_t i = 0; i < g.size(); ++i)
      g[i] = scale * std::log(sigmoid(in[0][i] + in[1][i % static_cast<size_t>(cols)]));
    return {g};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]);
    Strided<T> g(rows, cols);
    host_ops<T>().log_sigmoid_decay_forward(host_exec<T>(), x.view(), in[1].data(), static_cast<T>(scale), g.mat());
    return {g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols, in[0]);
    const Strided<T> dg(rows, cols, douts[0]);
    Strided<T> dx(rows, cols);
    std::vector<T> dbias = before[1];
    host_ops<T>().log_sigmoid_decay_backward(host_exec<T>(), dg.view(), x.view(), in[1].data(), static_cast<T>(scale),
                                             dx.mat(), dbias.data());
    return {dx.values(), dbias};
  }
};

TEST(LogSigmoidDecay, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) {
      for (double scale : {1.0, 0.0625})
        check_op(LogSigmoidDecayOp{rows, cols, scale}, "log_sigmoid_decay " + shape(rows, cols));
    }
  }
}

TEST(LogSigmoidDecay, BitsDoNotDependOnThreads) {
  check_threads(LogSigmoidDecayOp{3001, 65, 0.0625}, "log_sigmoid_decay");
}

// Far out log sigmoid is x on one side and -exp(-x) on the other, with all its digits.
TEST(LogSigmoidDecay, Extremes) {
  const std::vector<double> x{-1e30, -800, -30, 30, 700, std::numeric_limits<double>::quiet_NaN()};
  const std::vector<double> zeros(x.size(), 0.0);
  const std::vector<double> ones(x.size(), 1.0);
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<double> g(x.size());
  std::vector<double> dx(x.size());
  std::vector<double> dbias(x.size(), 0.0);
  host_ops<double>().log_sigmoid_decay_forward(host_exec<double>(), {x.data(), 1, n}, zeros.data(), 1.0,
                                               {g.data(), 1, n});
  host_ops<double>().log_sigmoid_decay_backward(host_exec<double>(), {ones.data(), 1, n}, {x.data(), 1, n},
                                                zeros.data(), 1.0, {dx.data(), 1, n}, dbias.data());
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    EXPECT_NEAR(g[i] / -softplus(-x[i]), 1.0, 1e-14) << "at " << x[i];
    EXPECT_NEAR(dx[i] / (x[i] < 0 ? 1 / (1 + std::exp(x[i])) : std::exp(-x[i]) / (1 + std::exp(-x[i]))), 1.0, 1e-14)
        << "slope at " << x[i];
  }
  EXPECT_TRUE(std::isnan(g.back()));
  EXPECT_TRUE(std::isnan(dx.back()));
}

// One learned number; its gradient is sigmoid_gate_backward's dbias at the values that forward made, as GainGate calls
// it.
struct LearnedGateOp {
  int64_t rows, cols;
  double scale;

  Values<double> inputs(Random& random) const { return {random_values(random, 1, 2.0)}; }
  std::vector<bool> accumulates() const { return {true}; }
  Values<double> formula(const Values<double>& in) const {
    return {std::vector<double>(static_cast<size_t>(rows * cols), scale * sigmoid(in[0][0]))};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> y(rows, cols);
    host_ops<T>().learned_gate_forward(host_exec<T>(), in[0].data(), static_cast<T>(scale), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> y(rows, cols, forward<T>(in)[0]);
    const Strided<T> dy(rows, cols, douts[0]);
    Strided<T> dx(rows, cols);
    std::vector<T> dparameter = before[0];
    host_ops<T>().sigmoid_gate_backward(host_exec<T>(), dy.view(), y.view(), static_cast<T>(scale), dx.mat(),
                                        dparameter.data());
    return {dparameter};
  }
};

// The one gradient is a sum over all tokens and columns of both signs: of 325 summands of the size 1 little may be
// left, and the error in float is of the summands.
TEST(LearnedGate, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) {
      for (double scale : {1.0, 2.0})
        check_op(LearnedGateOp{rows, cols, scale}, "learned_gate " + shape(rows, cols), {.float_gradient = 1e-4});
    }
  }
}

TEST(LearnedGate, BitsDoNotDependOnThreads) { check_threads(LearnedGateOp{9001, 3, 2.0}, "learned_gate"); }

struct PositionFactorOp {
  std::vector<int64_t> offsets;
  std::vector<int64_t> positions;  // empty: none before
  int64_t cols;
  PositionFactor factor;

  int64_t rows() const { return offsets.back(); }
  Values<double> inputs(Random& random) const { return {random_values(random, rows() * cols)}; }
  std::vector<bool> accumulates() const { return {false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y = in[0];
    for (size_t n = 0; n + 1 < offsets.size(); ++n) {
      for (int64_t t = offsets[n]; t < offsets[n + 1]; ++t) {
        const double position = static_cast<double>((positions.empty() ? 0 : positions[n]) + t - offsets[n] + 1);
        double f = 1;
        if (factor == PositionFactor::kInverse) f = 1 / position;
        if (factor == PositionFactor::kInverseSqrt) f = std::pow(position, -0.5);
        if (factor == PositionFactor::kInverseLog) f = 1 / std::log(1 + position);
        for (int64_t c = 0; c < cols; ++c) y[static_cast<size_t>(t * cols + c)] *= f;
      }
    }
    return {y};
  }
  template <class T>
  std::vector<T> run(const std::vector<T>& values) const {
    const SeqLayout sequences{offsets};
    const PassLayout layout(sequences, positions.empty() ? nullptr : positions.data());
    Strided<T> s(rows(), cols, values);
    Strided<T> y(rows(), cols);
    host_ops<T>().position_factor(host_exec<T>(), s.view(), factor, layout, y.mat());
    host_ops<T>().position_factor(host_exec<T>(), s.view(), factor, layout, s.mat());
    EXPECT_EQ(s.values(), y.values()) << "in place differs";
    return y.values();
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    return {run(in[0])};
  }
  template <class T>
  Values<T> backward(const Values<T>&, const Values<T>& douts, const Values<T>&) const {
    return {run(douts[0])};
  }
};

TEST(PositionFactor, ValuesAndGradients) {
  for (PositionFactor factor :
       {PositionFactor::kNone, PositionFactor::kInverse, PositionFactor::kInverseSqrt, PositionFactor::kInverseLog}) {
    const std::string name = "place factor " + std::to_string(static_cast<int>(factor));
    for (int64_t cols : {1, 3}) {
      check_op(PositionFactorOp{{0, 0}, {}, cols, factor}, name + " of nothing");
      check_op(PositionFactorOp{{0, 1}, {}, cols, factor}, name + " of one token");
      check_op(PositionFactorOp{{0, 5, 5, 6, 13}, {}, cols, factor}, name + " packed");
      check_op(PositionFactorOp{{0, 5, 5, 6, 13}, {7, 0, 1000000, 1}, cols, factor}, name + " continued");
    }
  }
}

TEST(PositionFactor, BitsDoNotDependOnThreads) {
  check_threads(PositionFactorOp{{0, 701, 9001}, {}, 3, PositionFactor::kInverseSqrt}, "place factor");
}

// g = log(1 - sigmoid(x)); backward adds to the gradient of x, the logit.
struct SingleGateDecayOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const { return {random_values(random, rows * cols, 2.0)}; }
  std::vector<bool> accumulates() const { return {true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> g(in[0].size());
    for (size_t i = 0; i < g.size(); ++i) g[i] = -softplus(in[0][i]);
    return {g};
  }
  template <class T>
  Strided<T> sigmoids(const Values<T>& in) const {
    Strided<T> s(rows, cols, in[0]);
    host_ops<T>().sigmoid_gate_forward(host_exec<T>(), s.view(), nullptr, T(1), s.mat());
    return s;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> s = sigmoids(in);
    Strided<T> g(rows, cols);
    host_ops<T>().single_gate_decay_forward(host_exec<T>(), s.view(), g.mat());
    return {g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> s = sigmoids(in);
    const Strided<T> dg(rows, cols, douts[0]);
    Strided<T> dlogit(rows, cols, before[0]);
    host_ops<T>().single_gate_decay_backward(host_exec<T>(), dg.view(), s.view(), dlogit.mat());
    return {dlogit.values()};
  }
};

// log(1 - s) from the rounded s loses the digits that 1 - s loses: 1 / (1 - s) of them, which at x = 7 is a thousand
// roundings.
TEST(SingleGateDecay, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65})
      check_op(SingleGateDecayOp{rows, cols}, "single_gate_decay " + shape(rows, cols),
               {.forward = 1e-12, .float_forward = 1e-4});
  }
}

TEST(SingleGateDecay, BitsDoNotDependOnThreads) { check_threads(SingleGateDecayOp{9001, 3}, "single_gate_decay"); }

TEST(SingleGateDecay, TheSlopeIsThereWhereOneMinusTheGateHasNoDigits) {
  const std::vector<float> x{40.0F};
  const Values<float> gradient = SingleGateDecayOp{1, 1}.backward<float>({x}, {{3.0F}}, {{0.0F}});
  EXPECT_EQ(gradient[0][0], -3.0F);
}

}  // namespace
}  // namespace fw::testing
