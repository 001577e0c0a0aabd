// RMSNorm, its variant on the residual stream, and the gated RMSNorm per head.
#include <fmt/format.h>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

constexpr double kEps = 1e-2;  // large, so that a row of one value, whose gradient is all eps, is well conditioned

std::vector<double> rmsnorm_formula(const std::vector<double>& x, const std::vector<double>& weight, int64_t rows,
                                    int64_t cols) {
  std::vector<double> y(x.size());
  for (int64_t t = 0; t < rows; ++t) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += x[t * cols + c] * x[t * cols + c];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(cols) + kEps);
    for (int64_t c = 0; c < cols; ++c)
      y[t * cols + c] = x[t * cols + c] * rstd * weight[c % static_cast<int64_t>(weight.size())];
  }
  return y;
}

struct RmsnormOp {
  int64_t rows, cols;
  bool add;  // the residual variant: inputs x, delta, weight
  Write write = Write::kOverwrite;

  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows * cols), random_values(random, rows * cols),
                      random_values(random, cols)};
    if (!add) in[1].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {write == Write::kAccumulate, false, true}; }

  Values<double> formula(const Values<double>& in) const {
    std::vector<double> x = in[0];
    for (size_t i = 0; i < in[1].size(); ++i) x[i] += in[1][i];
    return {rmsnorm_formula(x, in[2], rows, cols)};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> x(rows, cols, in[0]);
    Strided<T> y(rows, cols);
    std::vector<T> rstd(static_cast<size_t>(rows));
    if (add) {
      const Strided<T> delta(rows, cols, in[1]);
      host_ops<T>().add_rmsnorm_forward(host_exec<T>(), x.mat(), delta.view(), in[2].data(), T(kEps), y.mat(),
                                        rstd.data());
      const std::vector<T> sum = x.values();
      for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], in[0][i] + in[1][i]);
    } else {
      host_ops<T>().rmsnorm_forward(host_exec<T>(), x.view(), in[2].data(), T(kEps), y.mat(), rstd.data());
    }
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    Strided<T> x(rows, cols, in[0]);
    Strided<T> y(rows, cols);
    std::vector<T> rstd(static_cast<size_t>(rows));
    if (add) {
      const Strided<T> delta(rows, cols, in[1]);
      host_ops<T>().add_rmsnorm_forward(host_exec<T>(), x.mat(), delta.view(), in[2].data(), T(kEps), y.mat(),
                                        rstd.data());
    } else {
      host_ops<T>().rmsnorm_forward(host_exec<T>(), x.view(), in[2].data(), T(kEps), y.mat(), rstd.data());
    }
    const Strided<T> dy(rows, cols, douts[0]);
    Strided<T> dx = write == Write::kAccumulate ? Strided<T>(rows, cols, before[0]) : Strided<T>(rows, cols);
    std::vector<T> dweight = before[2];
    host_ops<T>().rmsnorm_backward(host_exec<T>(), dy.view(), x.view(), in[2].data(), rstd.data(), dx.mat(),
                                   dweight.data(), write);
    return {dx.values(), {}, dweight};
  }
};

TEST(Rmsnorm, ValuesAndGradients) {
  for (int64_t cols : {1, 7, 24, 65}) {
    for (bool add : {false, true}) {
      for (Write write : {Write::kOverwrite, Write::kAccumulate}) {
        check_op(RmsnormOp{5, cols, add, write}, "rmsnorm " + std::to_string(cols) + (add ? " add" : ""));
      }
    }
  }
}

TEST(Rmsnorm, BitsDoNotDependOnThreads) { check_threads(RmsnormOp{2000, 65, true}, "rmsnorm"); }

TEST(Rmsnorm, NoRows) { check_op(RmsnormOp{0, 7, false}, "rmsnorm of nothing"); }

TEST(Rmsnorm, NanReachesTheOutput) {
  std::vector<float> x(24, 1.0F);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> weight(24, 1.0F);
  std::vector<float> y(24);
  float rstd = 0;
  host_ops<float>().rmsnorm_forward(host_exec<float>(), {x.data(), 1, 24}, weight.data(), 1e-5F, {y.data(), 1, 24},
                                    &rstd);
  for (float v : y) EXPECT_TRUE(std::isnan(v));
}

double activation(GateKind kind, double x) {
  const double s = 1 / (1 + std::exp(-x));
  return kind == GateKind::kNone ? 1.0 : kind == GateKind::kSilu ? x * s : s;
}

struct GatedOp {
  int64_t rows, heads, dim;
  GateKind kind;
  bool biased = false;
  int64_t cols() const { return heads * dim; }

  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows * cols()), random_values(random, rows * cols(), 2.0),
                      random_values(random, dim), random_values(random, biased ? cols() : 0)};
    if (kind == GateKind::kNone) in[1].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, true, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y = rmsnorm_formula(in[0], in[2], rows * heads, dim);
    for (size_t i = 0; i < in[1].size(); ++i)
      y[i] *= activation(kind, in[1][i] + (biased ? in[3][i % in[3].size()] : 0.0));
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> o(rows, cols(), in[0]);
    std::vector<T> rstd(static_cast<size_t>(rows * heads));
    if (kind == GateKind::kNone) {
      Strided<T> y(rows, cols());
      host_ops<T>().gated_rmsnorm_forward(host_exec<T>(), o.view(), {}, nullptr, in[2].data(), T(kEps), dim, kind,
                                          y.mat(), rstd.data());
      return {y.values()};
    }
    const Strided<T> gate(rows, cols(), in[1]);
    const T* const bias = biased ? in[3].data() : nullptr;
    Strided<T> y(rows, cols());
    Strided<T> over_o = o;
    Strided<T> over_gate = gate;
    host_ops<T>().gated_rmsnorm_forward(host_exec<T>(), o.view(), gate.view(), bias, in[2].data(), T(kEps), dim, kind,
                                        y.mat(), rstd.data());
    host_ops<T>().gated_rmsnorm_forward(host_exec<T>(), over_o.view(), gate.view(), bias, in[2].data(), T(kEps), dim,
                                        kind, over_o.mat(), rstd.data());
    host_ops<T>().gated_rmsnorm_forward(host_exec<T>(), o.view(), over_gate.view(), bias, in[2].data(), T(kEps), dim,
                                        kind, over_gate.mat(), rstd.data());
    EXPECT_TRUE(same_bits<T>({over_o.values(), over_gate.values()}, {y.values(), y.values()})) << "in place differs";
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const bool gated = kind != GateKind::kNone;
    const Strided<T> o(rows, cols(), in[0]);
    const Strided<T> gate = gated ? Strided<T>(rows, cols(), in[1]) : Strided<T>(rows, cols());
    const Strided<T> dy(rows, cols(), douts[0]);
    Strided<T> y(rows, cols());
    Strided<T> d_o(rows, cols());
    Strided<T> dgate(rows, cols());
    std::vector<T> rstd(static_cast<size_t>(rows * heads));
    std::vector<T> dweight = before[2];
    const T* const bias = biased ? in[3].data() : nullptr;
    const Mat<const T> gate_view = gated ? gate.view() : Mat<const T>();
    host_ops<T>().gated_rmsnorm_forward(host_exec<T>(), o.view(), gate_view, bias, in[2].data(), T(kEps), dim, kind,
                                        y.mat(), rstd.data());
    host_ops<T>().gated_rmsnorm_backward(host_exec<T>(), dy.view(), o.view(), gate_view, bias, in[2].data(),
                                         rstd.data(), dim, kind, d_o.mat(), gated ? dgate.mat() : Mat<T>(),
                                         dweight.data());
    // The bias's gradient is for whoever made the gate to sum.
    std::vector<T> dbias(in[3].size());
    const std::vector<T> slopes = dgate.values();
    for (size_t i = 0; biased && i < slopes.size(); ++i) dbias[i % dbias.size()] += slopes[i];
    return {d_o.values(), gated ? slopes : std::vector<T>(), dweight, dbias};
  }
};

TEST(GatedRmsnorm, ValuesAndGradients) {
  for (int64_t dim : {1, 7, 24, 65}) {
    for (GateKind kind : {GateKind::kNone, GateKind::kSilu, GateKind::kSigmoid}) {
      for (const bool biased : {false, true}) {
        if (biased && kind == GateKind::kNone) continue;
        check_op(GatedOp{3, 2, dim, kind, biased},
                 fmt::format("gated rmsnorm {} kind {}, bias {}", dim, static_cast<int>(kind), biased));
      }
    }
  }
}

TEST(GatedRmsnorm, BitsDoNotDependOnThreads) { check_threads(GatedOp{1000, 3, 24, GateKind::kSilu}, "gated rmsnorm"); }

}  // namespace
}  // namespace fw::testing
