// Gated convolution: values, gradients, packed sequences, tails; splitting a sequence must not change its values.
#include <fmt/format.h>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct GatedConvOp {
  std::vector<int64_t> offsets;
  int64_t channels, width;
  bool tail;

  SeqLayout layout() const { return SeqLayout(offsets); }
  int64_t rows() const { return offsets.back(); }
  int64_t tail_size() const { return layout().count() * (width - 1) * channels; }

  // x, gate, weight, bias, tail
  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows() * channels), random_values(random, rows() * channels),
                      random_values(random, channels * width), random_values(random, channels),
                      random_values(random, tail_size())};
    if (!tail) in[4].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, true, true, false}; }

  template <class T>
  T at(const Values<T>& in, int64_t sequence, int64_t position, int64_t c) const {
    if (position >= 0) return in[0][(offsets[sequence] + position) * channels + c];
    if (!tail) return T(0);
    return in[4][(sequence * (width - 1) + width - 1 + position) * channels + c];
  }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    const SeqLayout packed = layout();
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t t = 0; t < packed.length(s); ++t) {
        for (int64_t c = 0; c < channels; ++c) {
          double sum = in[3][c];
          for (int64_t j = 0; j < width; ++j) sum += in[2][c * width + width - 1 - j] * at(in, s, t - j, c);
          const int64_t i = (packed.begin(s) + t) * channels + c;
          y[i] = in[0][i] + sum * in[1][i];
        }
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows(), channels, in[0]), gate(rows(), channels, in[1]);
    Strided<T> y(rows(), channels);
    std::vector<T> tail_out(static_cast<size_t>(tail_size()), std::numeric_limits<T>::quiet_NaN());
    host_ops<T>().gated_conv_forward(host_exec<T>(), x.view(), gate.view(), in[2].data(), in[3].data(), width, layout(),
                                     tail ? in[4].data() : nullptr, tail_out.data(), y.mat());
    const SeqLayout packed = layout();
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t i = 0; i < width - 1; ++i) {
        for (int64_t c = 0; c < channels; ++c) {
          EXPECT_EQ(tail_out[(s * (width - 1) + i) * channels + c], at(in, s, packed.length(s) - (width - 1) + i, c))
              << s << ", " << i << ", " << c;
        }
      }
    }
    if (tail) {
      std::vector<T> both = in[4];  // in place
      Strided<T> again(rows(), channels);
      host_ops<T>().gated_conv_forward(host_exec<T>(), x.view(), gate.view(), in[2].data(), in[3].data(), width,
                                       layout(), both.data(), both.data(), again.mat());
      EXPECT_TRUE(same_bits<T>({again.values(), both}, {y.values(), tail_out})) << "tail in place differs";
    }
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows(), channels, in[0]), gate(rows(), channels, in[1]), dy(rows(), channels, douts[0]);
    Strided<T> dx(rows(), channels), dgate(rows(), channels);
    std::vector<T> dweight = before[2], dbias = before[3];
    host_ops<T>().gated_conv_backward(host_exec<T>(), dy.view(), x.view(), gate.view(), in[2].data(), in[3].data(),
                                      width, layout(), tail ? in[4].data() : nullptr, dx.mat(), dgate.mat(),
                                      dweight.data(), dbias.data());
    return {dx.values(), dgate.values(), dweight, dbias, {}};
  }
};

TEST(GatedConv, ValuesAndGradients) {
  const std::vector<std::vector<int64_t>> layouts{{0, 6}, {0, 0, 5, 5, 6, 8, 8, 11, 11}, {0, 1}, {0, 0, 0}};
  for (const auto& offsets : layouts) {
    for (const int64_t channels : {1, 7, 65}) {
      for (const bool tail : {false, true})
        check_op(GatedConvOp{offsets, channels, 3, tail}, fmt::format("{} channels, tail {}", channels, tail));
    }
  }
  for (const int64_t width : {1, 2, 5}) {
    for (const bool tail : {false, true})
      check_op(GatedConvOp{{0, 2, 2, 9}, 7, width, tail}, fmt::format("{} taps, tail {}", width, tail));
  }
}

TEST(GatedConv, BitsDoNotDependOnThreads) {
  check_threads(GatedConvOp{{0, 300, 301, 500}, 200, 3, true}, "gated convolution");
}

}  // namespace
}  // namespace fw::testing
