// The selective scan of both laws against a loop over tokens, rows and channels in double and its finite differences.
// The cases are packed and empty sequences, chunks that end early, numbers of channels and rows that fill no vector,
// initial and final states.
#include <fmt/format.h>

#include <cmath>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct ScanOp {
  ScanLaw law;
  SeqLayout layout;
  int64_t channels, states;

  int64_t tokens() const { return layout.tokens(); }
  int64_t state_size() const { return layout.count() * states * channels; }
  bool mamba() const { return law == ScanLaw::kMamba; }

  // u, step, q, k, skip, s_in and, of Mamba, a_log.
  Values<double> inputs(Random& random) const {
    Values<double> in = {random_values(random, tokens() * channels),
                         random_values(random, tokens() * channels),
                         random_values(random, tokens() * states),
                         random_values(random, tokens() * states),
                         random_values(random, channels),
                         random_values(random, state_size())};
    for (double& x : in[1]) x = static_cast<double>(static_cast<float>(0.02 + 0.5 * std::abs(x)));
    if (mamba()) in.push_back(random_values(random, channels * states));
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, false, false, true, false, true}; }
  // y and the final states.
  Values<double> formula(const Values<double>& in) const {
    const auto at = [](int64_t row, int64_t column, int64_t columns) {
      return static_cast<size_t>(row * columns + column);
    };
    std::vector<double> y(in[0].size()), final_states;
    for (int64_t n = 0; n < layout.count(); ++n) {
      const auto first = in[5].begin() + n * states * channels;
      std::vector<double> s(first, first + states * channels);
      for (int64_t t = layout.begin(n); t < layout.end(n); ++t) {
        double square = 0;
        for (int64_t i = 0; i < states; ++i) square += in[3][at(t, i, states)] * in[3][at(t, i, states)];
        for (int64_t c = 0; c < channels; ++c) {
          const double u = in[0][at(t, c, channels)], step = in[1][at(t, c, channels)],
                       eps = step / (1 + step * square);
          double sum = in[4][static_cast<size_t>(c)] * u;
          for (int64_t i = 0; i < states; ++i) {
            const double k = in[3][at(t, i, states)];
            double& value = s[at(i, c, channels)];
            value = mamba() ? std::exp(-step * std::exp(in[6][at(c, i, states)])) * value + k * step * u
                            : (1 - eps * k * k) * value + k * eps * u;
            sum += in[2][at(t, i, states)] * value;
          }
          y[at(t, c, channels)] = sum;
        }
      }
      final_states.insert(final_states.end(), s.begin(), s.end());
    }
    return {y, final_states};
  }

  template <class T>
  struct Tensors {
    Strided<T> u, step, q, k, y;
    std::vector<T> s, checkpoints;
    const T* a_log;
    Tensors(const ScanOp& op, const Values<T>& in)
        : u(op.tokens(), op.channels, in[0]),
          step(op.tokens(), op.channels, in[1]),
          q(op.tokens(), op.states, in[2]),
          k(op.tokens(), op.states, in[3]),
          y(op.tokens(), op.channels),
          s(in[5]),
          checkpoints(static_cast<size_t>(chunk_checkpoints(op.tokens(), op.layout.count()) * op.states * op.channels)),
          a_log(op.mamba() ? in[6].data() : nullptr) {
      host_ops<T>().selective_scan_forward(host_exec<T>(), op.law, u.view(), step.view(), q.view(), k.view(), a_log,
                                           in[4].data(), op.layout, s.data(), s.data(), checkpoints.data(), y.mat());
    }
  };
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Tensors<T> run(*this, in);
    return {run.y.values(), run.s};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Tensors<T> run(*this, in);
    const Strided<T> dy(tokens(), channels, douts[0]);
    Strided<T> du(tokens(), channels), dstep(tokens(), channels), dq(tokens(), states), dk(tokens(), states);
    std::vector<T> dskip = before[4], ds(in[5].size()), da = mamba() ? before[6] : std::vector<T>();
    host_ops<T>().selective_scan_backward(host_exec<T>(), law, dy.view(), run.u.view(), run.step.view(), run.q.view(),
                                          run.k.view(), run.a_log, in[4].data(), layout, run.checkpoints.data(),
                                          douts[1].data(), du.mat(), dstep.mat(), dq.mat(), dk.mat(),
                                          mamba() ? da.data() : nullptr, dskip.data(), ds.data());
    Values<T> gradients = {du.values(), dstep.values(), dq.values(), dk.values(), dskip, ds};
    if (mamba()) gradients.push_back(da);
    return gradients;
  }
};

// Sums over tokens, rows and channels in float.
constexpr Tolerance kSums{1e-12, 1e-7, 1e-5, 5e-5};

void check_both(const SeqLayout& layout, int64_t channels, int64_t states) {
  check_op(ScanOp{ScanLaw::kMamba, layout, channels, states},
           fmt::format("mamba, {} tokens, {} x {}", layout.tokens(), states, channels), kSums);
  check_op(ScanOp{ScanLaw::kLonghorn, layout, channels, states},
           fmt::format("longhorn, {} tokens, {} x {}", layout.tokens(), states, channels), kSums);
}

TEST(SelectiveScan, Lengths) {
  for (const int64_t tokens : {0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 130}) check_both(SeqLayout({0, tokens}), 2, 2);
}

TEST(SelectiveScan, RowsAndChannels) {
  for (const int64_t states : {1, 3, 4, 5, 16}) check_both(SeqLayout({0, 3}), 3, states);
  for (const int64_t channels : {1, 7, 17, 127, 128, 129, 140}) check_both(SeqLayout({0, 2}), channels, 3);
}

TEST(SelectiveScan, PackedSequences) {
  check_both(SeqLayout({0, 0, 1, 17, 17, 20, 36, 40}), 3, 5);
  // More than there are groups of sequences, each of one token.
  check_both(SeqLayout({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), 5, 2);
}

TEST(SelectiveScan, BitsDoNotDependOnThreads) {
  check_threads(ScanOp{ScanLaw::kMamba, SeqLayout({0, 300, 301, 450}), 300, 16}, "mamba");
  check_threads(ScanOp{ScanLaw::kLonghorn, SeqLayout({0, 300, 301, 450}), 300, 16}, "longhorn");
}

// A step that forgets everything: the state is what the token wrote, and no gradient is infinite.
TEST(SelectiveScan, AStepThatForgetsAll) {
  const ScanOp op{ScanLaw::kMamba, SeqLayout({0, 3}), 1, 1};
  const Values<float> in = {{1, 2, 3}, {0.5F, 1e30F, 0.5F}, {1, 1, 1}, {1, 0, 1}, {0}, {5}, {0}};
  const Values<float> out = op.forward(in);
  EXPECT_EQ(out[0][1], 0.0F);
  EXPECT_EQ(out[1][0], 1.5F);
  for (const std::vector<float>& gradient :
       op.backward<float>(in, {{1, 1, 1}, {1}}, {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0}, {0}, {0}})) {
    for (const float x : gradient) EXPECT_TRUE(std::isfinite(x));
  }
}

// Sequences one after another, and one in two parts whose second begins with the state of the first, have the bits of
// the whole.
TEST(SelectiveScan, PartsAreTheWhole) {
  for (const ScanLaw law : {ScanLaw::kMamba, ScanLaw::kLonghorn}) {
    const ScanOp whole{law, SeqLayout({0, 50}), 9, 16};
    Random random(5);
    const Values<float> in = cast<float>(whole.inputs(random));
    const auto part = [&](int64_t begin, int64_t end, const std::vector<float>& state) {
      Values<float> of = in;
      for (const size_t i : {0, 1, 2, 3}) {
        const int64_t columns = i < 2 ? 9 : 16;
        of[i].assign(in[i].begin() + begin * columns, in[i].begin() + end * columns);
      }
      of[5] = state;
      return ScanOp{law, SeqLayout({0, end - begin}), 9, 16}.forward(of);
    };
    const Values<float> all = whole.forward(in), first = part(0, 21, in[5]), second = part(21, 50, first[1]);
    std::vector<float> joined = first[0];
    joined.insert(joined.end(), second[0].begin(), second[0].end());
    EXPECT_EQ(joined, all[0]);
    EXPECT_EQ(second[1], all[1]);
  }
}

}  // namespace
}  // namespace fw::testing
