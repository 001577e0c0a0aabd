// Parameters of a head as gates of every token: head_scale, head_constant, head_add, head_subtract; and the mean over a
// head's columns.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

// The formula's differences take the square of the rows.
#if defined(FW_SMALL_TESTS)
constexpr int64_t kRows[] = {0, 1, 5, 17};
#else
constexpr int64_t kRows[] = {0, 1, 5, 67};
#endif
struct Heads {
  int64_t heads, group;
};
constexpr Heads kHeads[] = {{1, 1}, {3, 1}, {1, 7}, {5, 13}};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// What the three have in common: x [rows, heads group] and s [heads] give y, element by element.
struct HeadGateOp {
  int64_t rows, heads, group;

  int64_t cols() const { return heads * group; }
  size_t head_of(size_t i) const { return i % static_cast<size_t>(cols()) / static_cast<size_t>(group); }
};

struct HeadScaleOp : HeadGateOp {
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols()), random_values(random, heads, 2.0)};
  }
  std::vector<bool> accumulates() const { return {true, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = sigmoid(in[1][head_of(i)]) * in[0][i];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols(), in[0]);
    Strided<T> y(rows, cols());
    host_ops<T>().head_scale_forward(host_exec<T>(), x.view(), in[1].data(), group, y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols(), in[0]);
    const Strided<T> dy(rows, cols(), douts[0]);
    Strided<T> dx(rows, cols(), before[0]);
    std::vector<T> ds = before[1];
    host_ops<T>().head_scale_backward(host_exec<T>(), dy.view(), x.view(), in[1].data(), group, dx.mat(), ds.data());
    return {dx.values(), ds};
  }
};

struct HeadConstantOp : HeadGateOp {
  Values<double> inputs(Random& random) const { return {random_values(random, heads)}; }
  std::vector<bool> accumulates() const { return {true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(static_cast<size_t>(rows * cols()));
    for (size_t i = 0; i < y.size(); ++i) y[i] = in[0][head_of(i)];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> y(rows, cols());
    host_ops<T>().head_constant_forward(host_exec<T>(), in[0].data(), group, y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>&, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> dy(rows, cols(), douts[0]);
    std::vector<T> ds = before[0];
    host_ops<T>().head_constant_backward(host_exec<T>(), dy.view(), group, ds.data());
    return {ds};
  }
};

// y += s x, or y -= s x. y is an input too: what is added to. Its gradient is dy as it stands, so none is given.
template <bool kAdd>
struct HeadSumOp : HeadGateOp {
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols()), random_values(random, heads), random_values(random, rows * cols())};
  }
  std::vector<bool> accumulates() const { return {true, true, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y = in[2];
    for (size_t i = 0; i < y.size(); ++i) y[i] += (kAdd ? 1 : -1) * in[1][head_of(i)] * in[0][i];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols(), in[0]);
    Strided<T> y(rows, cols(), in[2]);
    if constexpr (kAdd) {
      host_ops<T>().head_add_forward(host_exec<T>(), x.view(), in[1].data(), group, y.mat());
    } else {
      host_ops<T>().head_subtract_forward(host_exec<T>(), x.view(), in[1].data(), group, y.mat());
    }
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols(), in[0]);
    const Strided<T> dy(rows, cols(), douts[0]);
    Strided<T> dx(rows, cols(), before[0]);
    std::vector<T> ds = before[1];
    if constexpr (kAdd) {
      host_ops<T>().head_add_backward(host_exec<T>(), dy.view(), x.view(), in[1].data(), group, dx.mat(), ds.data());
    } else {
      host_ops<T>().head_subtract_backward(host_exec<T>(), dy.view(), x.view(), in[1].data(), group, dx.mat(),
                                           ds.data());
    }
    return {dx.values(), ds, {}};
  }
};

using HeadAddOp = HeadSumOp<true>;
using HeadSubtractOp = HeadSumOp<false>;

struct GroupMeanOp : HeadGateOp {
  Values<double> inputs(Random& random) const { return {random_values(random, rows * cols())}; }
  std::vector<bool> accumulates() const { return {true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(static_cast<size_t>(rows * heads), 0.0);
    for (size_t i = 0; i < in[0].size(); ++i)
      y[i / static_cast<size_t>(group)] += in[0][i] / static_cast<double>(group);
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols(), in[0]);
    Strided<T> y(rows, heads);
    host_ops<T>().group_mean_forward(host_exec<T>(), x.view(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>&, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> dy(rows, heads, douts[0]);
    Strided<T> dx(rows, cols(), before[0]);
    host_ops<T>().group_mean_backward(host_exec<T>(), dy.view(), dx.mat());
    return {dx.values()};
  }
};

template <class Op>
void check_all(const std::string& name) {
  for (int64_t rows : kRows) {
    for (const Heads& h : kHeads) {
      check_op(Op{rows, h.heads, h.group},
               name + " " + std::to_string(rows) + " x " + std::to_string(h.heads) + " x " + std::to_string(h.group));
    }
  }
}

TEST(HeadScale, ValuesAndGradients) { check_all<HeadScaleOp>("head_scale"); }
TEST(HeadConstant, ValuesAndGradients) { check_all<HeadConstantOp>("head_constant"); }
TEST(HeadSubtract, ValuesAndGradients) { check_all<HeadSubtractOp>("head_subtract"); }
TEST(HeadAdd, ValuesAndGradients) { check_all<HeadAddOp>("head_add"); }
TEST(GroupMean, ValuesAndGradients) { check_all<GroupMeanOp>("group_mean"); }

TEST(HeadGates, BitsDoNotDependOnThreads) {
  check_threads(HeadScaleOp{3001, 5, 13}, "head_scale");
  check_threads(HeadConstantOp{3001, 5, 13}, "head_constant");
  check_threads(HeadSubtractOp{{3001, 5, 13}}, "head_subtract");
  check_threads(HeadAddOp{{3001, 5, 13}}, "head_add");
  check_threads(GroupMeanOp{3001, 5, 13}, "group_mean");
}

TEST(GroupMean, OfAnAbsentMatrixIsZeroAndItsGradientIsSkipped) {
  Strided<float> y(3, 5);
  host_ops<float>().group_mean_forward(host_exec<float>(), {}, y.mat());
  EXPECT_EQ(y.values(), std::vector<float>(15, 0.0F));
  host_ops<float>().group_mean_backward(host_exec<float>(), y.view(), {});
}

}  // namespace
}  // namespace fw::testing
