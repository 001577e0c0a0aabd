// Feature maps: elu(x) + 1, relu(x), silu(x), tanh(x), relu(x)^2, and the product of two matrices.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct FeatureMapOp {
  FeatureMap map;
  int64_t rows, cols;

  // Differences need a way to go without meeting the corner at 0.
  Values<double> inputs(Random& random) const {
    std::vector<double> x = random_values(random, rows * cols, 2.0);
    for (double& v : x) v += v < 0 ? -0.0625 : 0.0625;
    return {x};
  }
  std::vector<bool> accumulates() const { return {false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) {
      const double x = in[0][i];
      const double positive = x > 0 ? x : 0;
      if (map == FeatureMap::kSilu) {
        y[i] = x / (1 + std::exp(-x));
      } else if (map == FeatureMap::kTanh) {
        y[i] = std::tanh(x);
      } else if (map == FeatureMap::kSquaredRelu) {
        y[i] = positive * positive;
      } else {
        y[i] = map == FeatureMap::kRelu ? positive : (x > 0 ? x + 1 : std::exp(x));
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]);
    Strided<T> y(rows, cols);
    host_ops<T>().feature_map_forward(host_exec<T>(), map, x.view(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> x(rows, cols, in[0]);
    Strided<T> dy(rows, cols, douts[0]);
    Strided<T> dx(rows, cols);
    host_ops<T>().feature_map_backward(host_exec<T>(), map, dy.view(), x.view(), dx.mat());
    host_ops<T>().feature_map_backward(host_exec<T>(), map, dy.view(), x.view(), dy.mat());
    EXPECT_EQ(dy.values(), dx.values()) << "in place differs";
    return {dx.values()};
  }
};

struct ProductOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols), random_values(random, rows * cols)};
  }
  std::vector<bool> accumulates() const { return {false, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = in[0][i] * in[1][i];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> a(rows, cols, in[0]);
    const Strided<T> b(rows, cols, in[1]);
    Strided<T> y(rows, cols);
    host_ops<T>().product_forward(host_exec<T>(), a.view(), b.view(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> a(rows, cols, in[0]);
    const Strided<T> b(rows, cols, in[1]);
    Strided<T> dy(rows, cols, douts[0]);
    Strided<T> da(rows, cols);
    Strided<T> db(rows, cols);
    const Exec<T> exec = host_exec<T>();
    exec.product_backward(dy.view(), a.view(), b.view(), da.mat(), db.mat());
    // dy may be the memory of either gradient.
    Strided<T> in_da(rows, cols, douts[0]);
    Strided<T> in_db(rows, cols, douts[0]);
    exec.product_backward(in_da.view(), a.view(), b.view(), in_da.mat(), dy.mat());
    EXPECT_TRUE(same_bits<T>({in_da.values(), dy.values()}, {da.values(), db.values()})) << "da in place of dy differs";
    exec.product_backward(in_db.view(), a.view(), b.view(), dy.mat(), in_db.mat());
    EXPECT_TRUE(same_bits<T>({dy.values(), in_db.values()}, {da.values(), db.values()})) << "db in place of dy differs";
    return {da.values(), db.values()};
  }
};

TEST(FeatureMap, ValuesAndGradients) {
  const std::pair<FeatureMap, const char*> maps[] = {{FeatureMap::kElu, "elu"},
                                                     {FeatureMap::kRelu, "relu"},
                                                     {FeatureMap::kSilu, "silu"},
                                                     {FeatureMap::kTanh, "tanh"},
                                                     {FeatureMap::kSquaredRelu, "relu^2"}};
  for (const auto& [map, name] : maps) {
    for (int64_t rows : {0, 1, 5}) {
      for (int64_t cols : {1, 7, 65}) check_op(FeatureMapOp{map, rows, cols}, name);
    }
  }
}

TEST(FeatureMap, BitsDoNotDependOnThreads) {
  check_threads(FeatureMapOp{FeatureMap::kElu, 3001, 65}, "elu");
  check_threads(FeatureMapOp{FeatureMap::kRelu, 3001, 65}, "relu");
}

TEST(FeatureMap, ReluAtZeroGivesNoGradient) {
  const Values<float> gradient =
      FeatureMapOp{FeatureMap::kRelu, 1, 3}.backward<float>({{0.0F, -0.0F, 1e-30F}}, {{5.0F, 5.0F, 5.0F}}, {});
  EXPECT_EQ(gradient[0], (std::vector<float>{0.0F, 0.0F, 5.0F}));
}

TEST(Product, ValuesAndGradients) {
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t cols : {1, 7, 65}) check_op(ProductOp{rows, cols}, "product");
  }
}

TEST(Product, BitsDoNotDependOnThreads) { check_threads(ProductOp{3001, 65}, "product"); }

}  // namespace
}  // namespace fw::testing
