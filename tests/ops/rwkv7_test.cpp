// The operations of RWKV-7's layers: values, gradients, packed sequences, tails; GroupNorm and LayerNorm.
#include <fmt/format.h>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct GroupNormOp {
  int64_t rows, groups, dim;
  Write write = Write::kOverwrite;
  static constexpr double kEps = 1e-2;

  int64_t cols() const { return groups * dim; }
  // x, weight, bias
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols()), random_values(random, cols()), random_values(random, cols())};
  }
  std::vector<bool> accumulates() const { return {write == Write::kAccumulate, true, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (int64_t first = 0; first < rows * cols(); first += dim) {
      double mean = 0, variance = 0;
      for (int64_t i = first; i < first + dim; ++i) mean += in[0][i] / static_cast<double>(dim);
      for (int64_t i = first; i < first + dim; ++i)
        variance += (in[0][i] - mean) * (in[0][i] - mean) / static_cast<double>(dim);
      for (int64_t i = first; i < first + dim; ++i)
        y[i] = (in[0][i] - mean) / std::sqrt(variance + kEps) * in[1][i % cols()] + in[2][i % cols()];
    }
    return {y};
  }
  template <class T>
  std::vector<T> run(const Values<T>& in, Mat<T> y) const {
    const Strided<T> x(rows, cols(), in[0]);
    std::vector<T> rstd(static_cast<size_t>(rows * groups));
    host_ops<T>().group_norm_forward(host_exec<T>(), x.view(), dim, in[1].data(), in[2].data(), T(kEps), y,
                                     rstd.data());
    return rstd;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> y(rows, cols());
    run<T>(in, y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols(), in[0]), dy(rows, cols(), douts[0]);
    Strided<T> y(rows, cols()), dx(rows, cols(), before[0]);
    const std::vector<T> rstd = run<T>(in, y.mat());
    std::vector<T> dweight = before[1], dbias = before[2];
    host_ops<T>().group_norm_backward(host_exec<T>(), dy.view(), x.view(), dim, in[1].data(), rstd.data(), dx.mat(),
                                      dweight.data(), dbias.data(), write);
    return {dx.values(), dweight, dbias};
  }
};

TEST(GroupNorm, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 5}) {
    for (const int64_t dim : {2, 7, 65}) {
      check_op(GroupNormOp{rows, 3, dim}, fmt::format("{} rows, groups of {}", rows, dim));
      check_op(GroupNormOp{rows, 1, dim, Write::kAccumulate}, fmt::format("{} rows, LayerNorm of {}", rows, dim));
    }
  }
  check_op(GroupNormOp{3, 4, 1}, "groups of one");
}
TEST(GroupNorm, BitsDoNotDependOnThreads) { check_threads(GroupNormOp{500, 4, 50}, "group norm"); }

// A row whose values are nearly alike: the variance is what is left of larger numbers.
TEST(GroupNorm, KeepsItsDigitsBesideALargeMean) {
  const std::vector<float> weight(64, 1.0f), bias(64, 0.0f);
  std::vector<float> x(64), y(64), rstd(1);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 4096.0f + (i % 2 == 0 ? 0.25f : -0.25f);
  host_ops<float>().group_norm_forward(host_exec<float>(), Mat<const float>(x.data(), 1, 64), 64, weight.data(),
                                       bias.data(), 1e-5f, Mat<float>(y.data(), 1, 64), rstd.data());
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], i % 2 == 0 ? 1.0 : -1.0, 1e-3) << i;
}

struct TokenShiftOp {
  std::vector<int64_t> offsets;
  int64_t channels, count;
  bool tail;

  SeqLayout layout() const { return SeqLayout(offsets); }
  int64_t rows() const { return offsets.back(); }

  // x, mix, tail
  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows() * channels), random_values(random, count * channels),
                      random_values(random, layout().count() * channels)};
    if (!tail) in[2].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, true, false}; }
  template <class T>
  T at(const Values<T>& in, int64_t sequence, int64_t position, int64_t c) const {
    if (position >= 0) return in[0][(offsets[sequence] + position) * channels + c];
    return tail ? in[2][sequence * channels + c] : T(0);
  }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(static_cast<size_t>(rows() * count * channels));
    const SeqLayout packed = layout();
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t t = 0; t < packed.length(s); ++t) {
        for (int64_t j = 0; j < count * channels; ++j) {
          const double here = at(in, s, t, j % channels), before = at(in, s, t - 1, j % channels);
          y[(packed.begin(s) + t) * count * channels + j] = (1 - in[1][j]) * here + in[1][j] * before;
        }
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows(), channels, in[0]);
    Strided<T> y(rows(), count * channels), again(rows(), count * channels);
    const SeqLayout packed = layout();
    std::vector<T> tail_out(static_cast<size_t>(packed.count() * channels), std::numeric_limits<T>::quiet_NaN());
    host_ops<T>().token_shift_forward(host_exec<T>(), x.view(), in[1].data(), count, packed,
                                      tail ? in[2].data() : nullptr, tail_out.data(), y.mat());
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t c = 0; c < channels; ++c)
        EXPECT_EQ(tail_out[s * channels + c], at(in, s, packed.length(s) - 1, c)) << s << ", " << c;
    }
    if (tail) {
      std::vector<T> both = in[2];  // in place
      host_ops<T>().token_shift_forward(host_exec<T>(), x.view(), in[1].data(), count, packed, both.data(), both.data(),
                                        again.mat());
      EXPECT_TRUE(same_bits<T>({again.values(), both}, {y.values(), tail_out})) << "tail in place differs";
    }
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows(), channels, in[0]), dy(rows(), count * channels, douts[0]);
    Strided<T> dx(rows(), channels);
    std::vector<T> dmix = before[1];
    host_ops<T>().token_shift_backward(host_exec<T>(), dy.view(), x.view(), in[1].data(), count, layout(),
                                       tail ? in[2].data() : nullptr, dx.mat(), dmix.data());
    return {dx.values(), dmix, {}};
  }
};

TEST(TokenShift, ValuesAndGradients) {
  const std::vector<std::vector<int64_t>> layouts{{0, 6}, {0, 0, 5, 5, 6, 8, 8, 11, 11}, {0, 1}, {0, 0, 0}};
  for (const auto& offsets : layouts) {
    for (const int64_t count : {1, 6}) {
      for (const bool tail : {false, true})
        check_op(TokenShiftOp{offsets, 7, count, tail}, fmt::format("{} mixes, tail {}", count, tail));
    }
  }
}
TEST(TokenShift, BitsDoNotDependOnThreads) {
  check_threads(TokenShiftOp{{0, 300, 300, 301, 500}, 200, 3, true}, "token shift");
}

struct FrontOp {
  int64_t rows, heads, dim;
  double eps;

  int64_t cols() const { return heads * dim; }
  // decay, rate, k, k_k, k_a
  Values<double> inputs(Random& random) const {
    Values<double> in;
    for (int i = 0; i < 3; ++i) in.push_back(random_values(random, rows * cols()));
    for (int i = 0; i < 2; ++i) in.push_back(random_values(random, cols()));
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, false, true, true}; }
  // g, p, f, key
  Values<double> formula(const Values<double>& in) const {
    Values<double> out(4, std::vector<double>(in[0].size()));
    for (int64_t first = 0; first < rows * cols(); first += dim) {
      double square = eps;
      for (int64_t i = first; i < first + dim; ++i) square += std::pow(in[2][i] * in[3][i % cols()], 2);
      for (int64_t i = first; i < first + dim; ++i) {
        const double a = sigmoid(in[1][i]), p = in[2][i] * in[3][i % cols()] / std::sqrt(square);
        out[0][i] = -std::exp(-0.5) * sigmoid(in[0][i]);
        out[1][i] = p;
        out[2][i] = p * a;
        out[3][i] = in[2][i] * (1 + (a - 1) * in[4][i % cols()]);
      }
    }
    return out;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> decay(rows, cols(), in[0]), rate(rows, cols(), in[1]), k(rows, cols(), in[2]);
    Strided<T> g(rows, cols()), p(rows, cols()), f(rows, cols()), key(rows, cols());
    host_ops<T>().rwkv7_front_forward(host_exec<T>(), {dim, eps}, decay.view(), rate.view(), k.view(), in[3].data(),
                                      in[4].data(), g.mat(), p.mat(), f.mat(), key.mat());
    return {g.values(), p.values(), f.values(), key.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> decay(rows, cols(), in[0]), rate(rows, cols(), in[1]), k(rows, cols(), in[2]),
        dg(rows, cols(), douts[0]), dp(rows, cols(), douts[1]), df(rows, cols(), douts[2]),
        dkey(rows, cols(), douts[3]);
    Strided<T> ddecay(rows, cols()), drate(rows, cols()), dk(rows, cols());
    std::vector<T> dk_k = before[3], dk_a = before[4];
    host_ops<T>().rwkv7_front_backward(host_exec<T>(), {dim, eps}, dg.view(), dp.view(), df.view(), dkey.view(),
                                       decay.view(), rate.view(), k.view(), in[3].data(), in[4].data(), ddecay.mat(),
                                       drate.mat(), dk.mat(), dk_k.data(), dk_a.data());
    return {ddecay.values(), drate.values(), dk.values(), dk_k, dk_a};
  }
};

TEST(Rwkv7Front, ValuesAndGradients) {
  for (const double eps : {0.0, 1e-2}) {
    for (const int64_t rows : {0, 1, 4}) {
      for (const int64_t dim : {2, 7, 16})
        check_op(FrontOp{rows, 3, dim, eps}, fmt::format("{} rows, heads of {}, epsilon {}", rows, dim, eps));
    }
  }
}
TEST(Rwkv7Front, BitsDoNotDependOnThreads) { check_threads(FrontOp{700, 3, 16, 0}, "front"); }

// No key at all: nothing is erased, and nothing is divided by 0. Below the floor the norm is constant.
TEST(Rwkv7Front, KeysOfZeroAndBelowTheFloor) {
  const FrontOp op{2, 1, 4, 0};
  Random random(3);
  Values<double> in = op.inputs(random);
  for (size_t i = 0; i < 8; ++i) in[2][i] = i < 4 ? 0 : 1e-20 * in[2][i];
  const Values<double> out = op.forward<double>(in);
  Values<double> ones(4, std::vector<double>(8, 1.0));
  const Values<double> grads =
      op.backward<double>(in, ones, {{}, {}, {}, std::vector<double>(4, 0.0), std::vector<double>(4, 0.0)});
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(out[1][i], in[2][i] * in[3][i % 4] * 1e12, 1e-20) << i;
    const double a = sigmoid(in[1][i]);
    EXPECT_NEAR(grads[2][i], (1 + a) * 1e12 * in[3][i % 4] + 1 + (a - 1) * in[4][i % 4], 1) << i;
  }
}

struct MixedValueOp {
  int64_t rows, cols;

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols), random_values(random, rows * cols), random_values(random, rows * cols)};
  }
  std::vector<bool> accumulates() const { return {false, true, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = (1 - sigmoid(in[2][i])) * in[0][i] + sigmoid(in[2][i]) * in[1][i];
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols, in[0]), to(rows, cols, in[1]), gate(rows, cols, in[2]);
    Strided<T> y(rows, cols);
    host_ops<T>().mixed_value_forward(host_exec<T>(), x.view(), to.view(), gate.view(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols, in[0]), to(rows, cols, in[1]), gate(rows, cols, in[2]);
    Strided<T> dy(rows, cols, douts[0]), dx(rows, cols), dto(rows, cols, before[1]), again(rows, cols, before[1]),
        dgate(rows, cols);
    const Exec<T> exec = host_exec<T>();
    exec.mixed_value_backward(dy.view(), x.view(), to.view(), gate.view(), dx.mat(), dto.mat(), dgate.mat());
    exec.mixed_value_backward(dy.view(), x.view(), to.view(), gate.view(), dy.mat(), again.mat(), dgate.mat());
    EXPECT_TRUE(same_bits<T>({dy.values(), again.values()}, {dx.values(), dto.values()})) << "in place differs";
    return {dx.values(), dto.values(), dgate.values()};
  }
};

TEST(MixedValue, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 5}) check_op(MixedValueOp{rows, 7}, fmt::format("{} rows", rows));
}
TEST(MixedValue, BitsDoNotDependOnThreads) { check_threads(MixedValueOp{700, 50}, "mixed value"); }

struct BonusGateOp {
  int64_t rows, heads, dim;

  int64_t cols() const { return heads * dim; }
  // o, r, key, v, gate, r_k
  Values<double> inputs(Random& random) const {
    Values<double> in;
    for (int i = 0; i < 5; ++i) in.push_back(random_values(random, rows * cols()));
    in.push_back(random_values(random, cols()));
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, false, false, false, true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    for (int64_t first = 0; first < rows * cols(); first += dim) {
      double sum = 0;
      for (int64_t i = first; i < first + dim; ++i) sum += in[1][i] * in[2][i] * in[5][i % cols()];
      for (int64_t i = first; i < first + dim; ++i) y[i] = (in[0][i] + sum * in[3][i]) * in[4][i];
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> o(rows, cols(), in[0]), r(rows, cols(), in[1]), key(rows, cols(), in[2]), v(rows, cols(), in[3]),
        gate(rows, cols(), in[4]);
    Strided<T> y(rows, cols());
    host_ops<T>().bonus_gate_forward(host_exec<T>(), o.view(), r.view(), key.view(), v.view(), gate.view(),
                                     in[5].data(), dim, y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> o(rows, cols(), in[0]), r(rows, cols(), in[1]), key(rows, cols(), in[2]), v(rows, cols(), in[3]),
        gate(rows, cols(), in[4]), dy(rows, cols(), douts[0]);
    Strided<T> d_o(rows, cols()), dr(rows, cols()), dkey(rows, cols()), dv(rows, cols()), dgate(rows, cols());
    std::vector<T> dr_k = before[5];
    host_ops<T>().bonus_gate_backward(host_exec<T>(), dy.view(), o.view(), r.view(), key.view(), v.view(), gate.view(),
                                      in[5].data(), dim, d_o.mat(), dr.mat(), dkey.mat(), dv.mat(), dgate.mat(),
                                      dr_k.data());
    return {d_o.values(), dr.values(), dkey.values(), dv.values(), dgate.values(), dr_k};
  }
};

TEST(BonusGate, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 4}) {
    for (const int64_t dim : {1, 7})
      check_op(BonusGateOp{rows, 3, dim}, fmt::format("{} rows, heads of {}", rows, dim));
  }
}
TEST(BonusGate, BitsDoNotDependOnThreads) { check_threads(BonusGateOp{700, 3, 16}, "bonus and gate"); }

}  // namespace
}  // namespace fw::testing
