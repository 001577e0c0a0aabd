// The log-decay with a learned lower bound, log(b + (1 - b) sigmoid(x)), b the sum of the softmax's rows 1 to layer.
#include <cmath>
#include <limits>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct BoundedDecayOp {
  int64_t rows, cols, layers, layer;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols, 3.0), random_values(random, layers * cols)};
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (int64_t c = 0; c < cols; ++c) {
      double sum = 0, bound = 0;
      for (int64_t i = 0; i < layers; ++i) sum += std::exp(in[1][i * cols + c]);
      for (int64_t i = 1; i <= layer; ++i) bound += std::exp(in[1][i * cols + c]) / sum;
      for (int64_t t = 0; t < rows; ++t)
        y[t * cols + c] = std::log(bound + (1 - bound) / (1 + std::exp(-in[0][t * cols + c])));
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]), bounds(layers, cols, in[1]);
    Strided<T> g(rows, cols);
    host_ops<T>().bounded_decay_forward(host_exec<T>(), x.view(), bounds.view(), layer, g.mat());
    return {g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& grads) const {
    const Strided<T> x(rows, cols, in[0]), bounds(layers, cols, in[1]), dg(rows, cols, douts[0]);
    Strided<T> dx(rows, cols), dbounds(layers, cols, grads[1]);
    host_ops<T>().bounded_decay_backward(host_exec<T>(), dg.view(), x.view(), bounds.view(), layer, dx.mat(),
                                         dbounds.mat());
    return {dx.values(), dbounds.values()};
  }
};

TEST(BoundedDecay, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) {
      for (int64_t layer : {0, 1, 2}) check_op(BoundedDecayOp{rows, cols, 3, layer}, "bounded decay");
    }
  }
}

TEST(BoundedDecay, BitsDoNotDependOnThreads) { check_threads(BoundedDecayOp{3001, 65, 4, 2}, "bounded decay"); }

// Decays near 1 and near 0 keep their digits: 1 - exp(g) is the gate of what is written.
TEST(BoundedDecay, KeepsItsDigitsAtBothEnds) {
  const std::vector<float> x = {40.0F, 20.0F, -20.0F, -200.0F, 200.0F};
  const Values<float> first = BoundedDecayOp{1, 5, 2, 0}.forward<float>({x, std::vector<float>(10, 0.0F)});
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = -std::log1p(std::exp(-static_cast<double>(x[i])));
    EXPECT_NEAR(first[0][i], expected, 1e-6 * std::abs(expected) + 1e-38) << x[i];
  }
  const Values<float> second = BoundedDecayOp{1, 5, 2, 1}.forward<float>({x, std::vector<float>(10, 0.0F)});
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::log1p(-0.5 / (1 + std::exp(static_cast<double>(x[i]))));
    EXPECT_NEAR(second[0][i], expected, 1e-6 * std::abs(expected) + 1e-38) << x[i];
  }
  const Values<float> gradient = BoundedDecayOp{1, 5, 2, 0}.backward<float>(
      {x, std::vector<float>(10, 0.0F)}, {std::vector<float>(5, 1.0F)}, {{}, std::vector<float>(10, 0.0F)});
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = 1 / (1 + std::exp(static_cast<double>(x[i])));
    EXPECT_NEAR(gradient[0][i], expected, 1e-6 * expected + 1e-38) << x[i];
  }
}

}  // namespace
}  // namespace fw::testing
