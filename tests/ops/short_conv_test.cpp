// Short convolution: packed sequences, tails, empty and short sequences; splitting a sequence must not change its
// values.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct ConvOp {
  std::vector<int64_t> offsets;
  int64_t channels, width;
  bool tail;
  bool bias = false;

  SeqLayout layout() const { return SeqLayout(offsets); }
  int64_t rows() const { return offsets.back(); }
  int64_t tail_size() const { return layout().count() * (width - 1) * channels; }

  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows() * channels), random_values(random, channels * width),
                      random_values(random, tail_size()), random_values(random, bias ? channels : 0)};
    if (!tail) in[2].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, true, false, true}; }
  template <class T>
  const T* bias_of(const Values<T>& in) const {
    return bias ? in[3].data() : nullptr;
  }

  // The input of a sequence at a position that may lie before its begin.
  template <class T>
  T at(const Values<T>& in, int64_t sequence, int64_t position, int64_t c) const {
    if (position >= 0) return in[0][(offsets[sequence] + position) * channels + c];
    if (!tail) return T(0);
    return in[2][(sequence * (width - 1) + width - 1 + position) * channels + c];
  }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    const SeqLayout packed = layout();
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t t = 0; t < packed.length(s); ++t) {
        for (int64_t c = 0; c < channels; ++c) {
          double p = bias ? in[3][static_cast<size_t>(c)] : 0;
          for (int64_t j = 0; j < width; ++j) p += in[1][c * width + width - 1 - j] * at(in, s, t - j, c);
          y[(packed.begin(s) + t) * channels + c] = p / (1 + std::exp(-p));
        }
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows(), channels, in[0]);
    Strided<T> y(rows(), channels);
    const T nan = std::numeric_limits<T>::quiet_NaN();
    std::vector<T> tail_out(static_cast<size_t>(tail_size()), nan);
    host_ops<T>().short_conv_forward(host_exec<T>(), x.view(), in[1].data(), bias_of(in), width, layout(),
                                     tail ? in[2].data() : nullptr, tail_out.data(), y.mat());
    check_tail(in, tail_out);
    if (tail) {
      std::vector<T> both = in[2];  // in place
      Strided<T> again(rows(), channels);
      host_ops<T>().short_conv_forward(host_exec<T>(), x.view(), in[1].data(), bias_of(in), width, layout(),
                                       both.data(), both.data(), again.mat());
      EXPECT_TRUE(same_bits<T>({again.values(), both}, {y.values(), tail_out})) << "tail in place differs";
    }
    return {y.values()};
  }
  template <class T>
  void check_tail(const Values<T>& in, const std::vector<T>& got) const {
    const SeqLayout packed = layout();
    for (int64_t s = 0; s < packed.count(); ++s) {
      for (int64_t i = 0; i < width - 1; ++i) {
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t position = packed.length(s) - (width - 1) + i;
          // Further back than the old tail cannot happen: length >= 0.
          ASSERT_EQ(got[(s * (width - 1) + i) * channels + c], at(in, s, position, c))
              << "tail of sequence " << s << ", entry " << i << ", channel " << c;
        }
      }
    }
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows(), channels, in[0]);
    const Strided<T> dy(rows(), channels, douts[0]);
    Strided<T> dx(rows(), channels);
    std::vector<T> dweight = before[1], dbias = before[3];
    host_ops<T>().short_conv_backward(host_exec<T>(), dy.view(), x.view(), in[1].data(), bias_of(in), width, layout(),
                                      tail ? in[2].data() : nullptr, dx.mat(), dweight.data(),
                                      bias ? dbias.data() : nullptr);
    return {dx.values(), dweight, {}, dbias};
  }
};

TEST(ShortConv, ValuesAndGradients) {
  const std::vector<std::vector<int64_t>> layouts{{0, 6}, {0, 0, 5, 5, 6, 8, 8, 11, 11}, {0, 1}};
  for (const auto& offsets : layouts) {
    for (int64_t channels : {1, 7, 24, 65}) {
      for (bool tail : {false, true})
        check_op(ConvOp{offsets, channels, 4, tail},
                 "conv of " + std::to_string(channels) + (tail ? " with tail" : ""));
    }
  }
  for (int64_t width : {1, 2, 3, 5}) {
    for (bool tail : {false, true})
      check_op(ConvOp{{0, 2, 2, 9}, 7, width, tail}, "conv of width " + std::to_string(width));
  }
  for (const auto& offsets : layouts) {
    for (int64_t width : {1, 4, 5}) check_op(ConvOp{offsets, 24, width, true, true}, "conv with bias");
  }
}

TEST(ShortConv, NoTokens) { check_op(ConvOp{{0, 0, 0}, 7, 4, true}, "conv of nothing"); }

// Long enough for several blocks, whose borders fall inside sequences and next to their ends.
TEST(ShortConv, BlocksDoNotShow) {
  const ConvOp op{{0, 700, 701, 701, 1399, 1402, 2100}, 48, 4, true};
  Random random(3);
  const Values<double> in = op.inputs(random);
  expect_close(op.forward<double>(in)[0], op.formula(in)[0], 1e-13, "conv in blocks");
  // The gradient of sum(y dy), one sequence alone against the packed run.
  const Values<double> douts{random_values(random, op.rows() * op.channels)};
  const Values<double> before{{}, std::vector<double>(static_cast<size_t>(op.channels * op.width), 0.0), {}, {}};
  const Values<double> packed = op.backward<double>(in, douts, before);
  std::vector<double> dx;
  std::vector<double> dweight(before[1].size(), 0.0);
  const SeqLayout layout = op.layout();
  for (int64_t s = 0; s < layout.count(); ++s) {
    const auto part = [&](const std::vector<double>& v, int64_t begin, int64_t end, int64_t unit) {
      return std::vector<double>(v.begin() + begin * unit, v.begin() + end * unit);
    };
    const int64_t unit = op.channels;
    // Pieces of 16 tokens through the formula's own definition would repeat it; a run per sequence in one block is
    // enough.
    const ConvOp one{{0, layout.length(s)}, unit, 4, true};
    const Values<double> alone_in{
        part(in[0], layout.begin(s), layout.end(s), unit), in[1], part(in[2], 3 * s, 3 * s + 3, unit), {}};
    const Values<double> alone =
        one.backward<double>(alone_in, {part(douts[0], layout.begin(s), layout.end(s), unit)}, before);
    dx.insert(dx.end(), alone[0].begin(), alone[0].end());
    for (size_t i = 0; i < dweight.size(); ++i) dweight[i] += alone[1][i];
  }
  EXPECT_EQ(packed[0], dx) << "a sequence must have the same bits alone and packed";
  expect_close(packed[1], dweight, 1e-13, "dweight");
}

TEST(ShortConv, BitsDoNotDependOnThreads) { check_threads(ConvOp{{0, 700, 701, 1500}, 65, 4, true, true}, "conv"); }

TEST(ShortConv, SplittingASequenceKeepsItsBits) {
  Random random(5);
  const ConvOp whole{{0, 11}, 24, 4, false};
  const Values<float> in = cast<float>(whole.inputs(random));
  const std::vector<float> y = whole.forward<float>(in)[0];
  for (int64_t cut = 0; cut <= 11; ++cut) {
    std::vector<float> tail(3 * 24, 0.0F);
    std::vector<float> pieces(11 * 24);
    host_ops<float>().short_conv_forward(host_exec<float>(), {in[0].data(), cut, 24}, in[1].data(), nullptr, 4,
                                         SeqLayout({0, cut}), nullptr, tail.data(), {pieces.data(), cut, 24});
    host_ops<float>().short_conv_forward(host_exec<float>(), {in[0].data() + cut * 24, 11 - cut, 24}, in[1].data(),
                                         nullptr, 4, SeqLayout({0, 11 - cut}), tail.data(), tail.data(),
                                         {pieces.data() + cut * 24, 11 - cut, 24});
    EXPECT_EQ(pieces, y) << "cut after " << cut;
  }
}

}  // namespace
}  // namespace fw::testing
