// Experts: the router's weights and gradients against its formula, the order of the rows, products of each expert.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

// Rows with memory of their own.
struct OwnedRows {
  OwnedRows(int64_t experts, int64_t chosen, int64_t tokens)
      : offsets(static_cast<size_t>(experts + 1)),
        source(static_cast<size_t>(tokens * chosen)),
        row_of(source.size()),
        expert(source.size()),
        rows{experts, chosen, offsets.data(), source.data(), row_of.data(), expert.data()} {}
  std::vector<int32_t> offsets, source, row_of, expert;
  ExpertRows rows;
};

// Outputs: weights [T, k] in the order of the choice, and the loss of the balance.
struct RouteOp {
  RouterShape shape;
  int64_t tokens;
  bool with_bias = false;

  std::vector<double> bias() const {
    Random random(3);
    return random_values(random, shape.experts, 0.3);
  }
  Values<double> inputs(Random& random) const { return {random_values(random, tokens * shape.experts, 1.5)}; }
  std::vector<bool> accumulates() const { return {false}; }

  std::vector<double> scores(const double* logits) const {
    std::vector<double> s(logits, logits + shape.experts);
    for (double& x : s) x = shape.score == RouterScore::kSigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x);
    if (shape.score == RouterScore::kSoftmax) {
      const double sum = std::accumulate(s.begin(), s.end(), 0.0);
      for (double& x : s) x /= sum;
    }
    return s;
  }
  std::vector<int64_t> choice(const std::vector<double>& s) const {
    std::vector<double> by = s;
    const std::vector<double> b = bias();
    for (size_t e = 0; e < by.size(); ++e) by[e] += with_bias ? b[e] : 0;
    const int64_t size = shape.experts / shape.groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < shape.groups; ++g) {
      std::vector<double> of(by.begin() + g * size, by.begin() + (g + 1) * size);
      std::sort(of.rbegin(), of.rend());
      groups.emplace_back(-(of[0] + (size > 1 ? of[1] : 0)), g);
    }
    std::sort(groups.begin(), groups.end());
    std::vector<int64_t> order;
    for (int64_t i = 0; i < shape.best_groups; ++i) {
      for (int64_t e = 0; e < size; ++e) order.push_back(groups[static_cast<size_t>(i)].second * size + e);
    }
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b2) { return by[static_cast<size_t>(a)] > by[static_cast<size_t>(b2)]; });
    order.resize(static_cast<size_t>(shape.chosen));
    return order;
  }
  Values<double> formula(const Values<double>& in) const {
    const auto E = static_cast<size_t>(shape.experts);
    std::vector<double> weights, rows(E), shares(E);
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> s = scores(in[0].data() + t * shape.experts);
      double sum = 0;
      for (const int64_t e : choice(s)) sum += s[static_cast<size_t>(e)];
      for (const int64_t e : choice(s)) {
        weights.push_back(shape.scale * s[static_cast<size_t>(e)] / (shape.normalised ? sum : 1));
        ++rows[static_cast<size_t>(e)];
      }
      const double all = std::accumulate(s.begin(), s.end(), 0.0);
      for (size_t e = 0; e < E; ++e) shares[e] += s[e] / all;
    }
    const double loss = std::inner_product(rows.begin(), rows.end(), shares.begin(), 0.0) *
                        static_cast<double>(shape.experts) / static_cast<double>(tokens);
    return {weights, {loss}};
  }

  template <class T>
  struct Routed {
    Routed(const RouteOp& op, const std::vector<T>& logits)
        : scores(op.tokens, op.shape.experts, logits),
          rows(op.shape.experts, op.shape.chosen, op.tokens),
          weights(static_cast<size_t>(op.tokens * op.shape.chosen)),
          load(static_cast<size_t>(op.shape.experts), 1) {
      const std::vector<double> b = op.bias();
      const std::vector<T> bias(b.begin(), b.end());
      host_ops<T>().route_forward(host_exec<T>(), op.shape, scores.view(), op.with_bias ? bias.data() : nullptr,
                                  scores.mat(), rows.rows, column(weights), load.data());
    }
    static Mat<T> column(std::vector<T>& values) { return {values.data(), static_cast<int64_t>(values.size()), 1}; }
    Strided<T> scores;
    OwnedRows rows;
    std::vector<T> weights;
    std::vector<int64_t> load;
  };

  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Routed<T> routed(*this, in[0]);
    std::vector<T> weights, shares(static_cast<size_t>(shape.experts));
    for (const int32_t row : routed.rows.row_of) weights.push_back(routed.weights[static_cast<size_t>(row)]);
    for (int64_t t = 0; t < tokens; ++t) {
      const T* s = routed.scores.view().row(t);
      const T all = std::accumulate(s, s + shape.experts, T(0));
      for (size_t e = 0; e < shares.size(); ++e) shares[e] += s[e] / all;
    }
    T loss = 0;
    for (size_t e = 0; e < shares.size(); ++e)
      loss += static_cast<T>(routed.load[e] - 1) * shares[e] * static_cast<T>(shape.experts) / static_cast<T>(tokens);
    return {weights, {loss}};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    Routed<T> routed(*this, in[0]);
    std::vector<T> dweights(douts[0].size());
    for (size_t i = 0; i < dweights.size(); ++i) dweights[static_cast<size_t>(routed.rows.row_of[i])] = douts[0][i];
    Strided<T> dlogits(tokens, shape.experts);
    // The loss is the sum over the tokens; route_backward's coefficient is a token's.
    host_ops<T>().route_backward(host_exec<T>(), shape, routed.column(dweights), routed.scores.view(), routed.rows.rows,
                                 routed.column(routed.weights), douts[1][0], dlogits.mat());
    return {dlogits.values()};
  }
};

TEST(Route, WeightsAndGradients) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const bool normalised : {false, true}) {
      for (const auto& [experts, chosen, groups, best] :
           std::vector<std::array<int64_t, 4>>{{1, 1, 1, 1}, {5, 2, 1, 1}, {4, 4, 1, 1}, {12, 3, 4, 2}, {4, 2, 4, 3}}) {
        const RouterShape shape{score, experts, chosen, groups, best, normalised, 1.7};
        for (const bool bias : {false, true})
          check_op(RouteOp{shape, 7, bias}, fmt::format("{} of {}, {} groups", chosen, experts, groups),
                   {.float_forward = 1e-5, .float_gradient = 1e-4});
      }
    }
  }
}

TEST(Route, BitsDoNotDependOnThreads) { check_threads(RouteOp{{RouterScore::kSoftmax, 37, 5}, 900}, "route"); }

// Equal scores and scores that are no numbers: the smallest experts, and every row has an index.
TEST(Route, TiesAndNaN) {
  for (const double x : {0.0, std::nan("")}) {
    RouteOp op{{RouterScore::kSigmoid, 6, 2}, 3};
    RouteOp::Routed<double> routed(op, std::vector<double>(18, x));
    EXPECT_EQ(routed.rows.offsets, (std::vector<int32_t>{0, 3, 6, 6, 6, 6, 6}));
    EXPECT_EQ(routed.rows.source, (std::vector<int32_t>{0, 2, 4, 1, 3, 5}));
    EXPECT_EQ(routed.rows.row_of, (std::vector<int32_t>{0, 3, 1, 4, 2, 5}));
    EXPECT_EQ(routed.rows.expert, (std::vector<int32_t>{0, 0, 0, 1, 1, 1}));
    EXPECT_EQ(routed.load, (std::vector<int64_t>{4, 4, 1, 1, 1, 1}));
  }
}

// Products of the rows of each expert, with experts that have none, one or all of them.
struct ExpertLinearOp {
  std::vector<int32_t> offsets;
  int64_t in, out;

  int64_t rows() const { return offsets.back(); }
  int64_t experts() const { return static_cast<int64_t>(offsets.size()) - 1; }
  ExpertRows expert_rows() const { return {experts(), 1, const_cast<int32_t*>(offsets.data()), nullptr, nullptr}; }
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows() * in), random_values(random, experts() * out * in)};
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  Values<double> formula(const Values<double>& v) const {
    std::vector<double> y;
    for (int64_t e = 0; e < experts(); ++e) {
      for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
        for (int64_t o = 0; o < out; ++o)
          y.push_back(std::inner_product(v[0].data() + r * in, v[0].data() + (r + 1) * in,
                                         v[1].data() + (e * out + o) * in, 0.0));
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& v) const {
    const Strided<T> x(rows(), in, v[0]);
    Strided<T> y(rows(), out);
    host_ops<T>().expert_linear_forward(host_exec<T>(), x.view(), expert_rows(),
                                        Mat<const T>(v[1].data(), experts() * out, in), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& v, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows(), in, v[0]), dy(rows(), out, douts[0]);
    Strided<T> dx(rows(), in);
    std::vector<T> dweight = before[1];
    host_ops<T>().expert_linear_backward(host_exec<T>(), dy.view(), x.view(), expert_rows(),
                                         Mat<const T>(v[1].data(), experts() * out, in), dx.mat(),
                                         Mat<T>(dweight.data(), experts() * out, in));
    return {dx.values(), dweight};
  }
};

TEST(ExpertLinear, ValuesAndGradients) {
  for (const std::vector<int32_t>& offsets :
       std::vector<std::vector<int32_t>>{{0, 0}, {0, 1}, {0, 0, 9, 9}, {0, 1, 6, 6, 8}})
    check_op(ExpertLinearOp{offsets, 5, 7}, "expert_linear", {.float_forward = 1e-5});
}
TEST(ExpertLinear, BitsDoNotDependOnThreads) { check_threads(ExpertLinearOp{{0, 3, 3, 70}, 65, 33}, "expert_linear"); }

struct ScaleRowsOp {
  int64_t rows, cols;
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols), random_values(random, rows)};
  }
  std::vector<bool> accumulates() const { return {false, false}; }
  Values<double> formula(const Values<double>& v) const {
    std::vector<double> y = v[0];
    for (size_t i = 0; i < y.size(); ++i) y[i] *= v[1][i / static_cast<size_t>(cols)];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& v) const {
    Strided<T> x(rows, cols, v[0]), s(rows, 1, v[1]);
    host_ops<T>().scale_rows_forward(host_exec<T>(), x.view(), s.view(), x.mat());  // in place
    return {x.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& v, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> x(rows, cols, v[0]), s(rows, 1, v[1]);
    Strided<T> dy(rows, cols, douts[0]), ds(rows, 1);
    host_ops<T>().scale_rows_backward(host_exec<T>(), dy.view(), x.view(), s.view(), dy.mat(), ds.mat());
    return {dy.values(), ds.values()};
  }
};

TEST(ScaleRows, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 5}) check_op(ScaleRowsOp{rows, 7}, "scale_rows");
}
TEST(ScaleRows, BitsDoNotDependOnThreads) { check_threads(ScaleRowsOp{3001, 65}, "scale_rows"); }

// x goes to its rows and comes back as often as its token has experts, whatever the experts are.
template <class T>
void check_there_and_back() {
  const int64_t tokens = 11, cols = 6;
  RouteOp op{{RouterScore::kSoftmax, 5, 3}, tokens};
  Random random(2);
  const Values<T> logits = cast<T>(op.inputs(random)),
                  values = cast<T>(Values<double>{random_values(random, tokens * cols)});
  RouteOp::Routed<T> routed(op, logits[0]);
  const Strided<T> x(tokens, cols, values[0]);
  Strided<T> rows(tokens * 3, cols), sum(tokens, cols), twice(tokens, cols, values[0]);
  host_ops<T>().gather_expert_rows(host_exec<T>(), x.view(), routed.rows.rows, rows.mat());
  for (int64_t r = 0; r < tokens * 3; ++r) {
    const int64_t token = routed.rows.source[static_cast<size_t>(r)] / 3;
    EXPECT_TRUE(std::equal(rows.view().row(r), rows.view().row(r) + cols, x.view().row(token))) << r;
  }
  host_ops<T>().sum_expert_rows(host_exec<T>(), rows.view(), routed.rows.rows, sum.mat(), Write::kOverwrite);
  host_ops<T>().sum_expert_rows(host_exec<T>(), rows.view(), routed.rows.rows, twice.mat(), Write::kAccumulate);
  std::vector<double> three, four;
  for (const T value : values[0]) {
    three.push_back(3 * static_cast<double>(value));
    four.push_back(4 * static_cast<double>(value));
  }
  expect_close(sum.values(), three, 1e-6, "overwritten");
  expect_close(twice.values(), four, 1e-6, "accumulated");
}
TEST(ExpertRows, ThereAndBack) {
  check_there_and_back<float>();
  check_there_and_back<double>();
}

}  // namespace
}  // namespace fw::testing
