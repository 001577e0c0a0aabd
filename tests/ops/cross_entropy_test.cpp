// Cross-entropy: sums, gradients, unscored positions, stability, slices.
#include "base/arena.h"
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

// The sum of one call; the operation adds to what there is.
template <class T>
LossSum loss_forward(Mat<const T> h, Mat<const T> weight, const std::vector<int32_t>& targets, T* nll,
                     Precision precision = Precision::kNative) {
  LossSum sum;
  host_exec<T>(precision).cross_entropy_forward(h, weight, targets.data(), nll, &sum);
  return sum;
}
template <class T>
LossSum loss_backward(Mat<const T> h, Mat<const T> weight, const std::vector<int32_t>& targets, T scale, Mat<T> dh,
                      Mat<T> dweight, Precision precision = Precision::kNative) {
  LossSum sum;
  host_exec<T>(precision).cross_entropy_backward(h, weight, targets.data(), scale, dh, dweight, &sum);
  return sum;
}

struct CrossEntropyOp {
  int64_t dim, vocab;
  std::vector<int32_t> targets;
  Precision precision = Precision::kNative;
  double scale = 0.37;
  int64_t rows() const { return static_cast<int64_t>(targets.size()); }

  Values<double> inputs(Random& random) const {
    return {random_values(random, rows() * dim), random_values(random, vocab * dim)};
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  std::vector<double> position_nll(const Values<double>& in) const {
    std::vector<double> nll(targets.size(), 0.0);
    for (int64_t t = 0; t < rows(); ++t) {
      if (targets[t] < 0) continue;
      std::vector<double> logits(static_cast<size_t>(vocab));
      double largest = -std::numeric_limits<double>::infinity();
      for (int64_t v = 0; v < vocab; ++v) {
        for (int64_t i = 0; i < dim; ++i) logits[v] += in[0][t * dim + i] * in[1][v * dim + i];
        largest = std::max(largest, logits[v]);
      }
      double sum = 0;
      for (double l : logits) sum += std::exp(l - largest);
      nll[t] = std::log(sum) + largest - logits[targets[t]];
    }
    return nll;
  }
  int64_t count() const {
    return std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
  }
  // Outputs: the sum, and the values per position.
  Values<double> formula(const Values<double>& in) const {
    const std::vector<double> nll = position_nll(in);
    double sum = 0;
    for (double v : nll) sum += v;
    return {{sum}, nll};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> h(rows(), dim, in[0]);
    const Strided<T> weight(vocab, dim, in[1]);
    std::vector<T> nll(targets.size(), std::numeric_limits<T>::quiet_NaN());
    const LossSum sum = loss_forward<T>(h.view(), weight.view(), targets, nll.data(), precision);
    EXPECT_EQ(sum.count, count());
    EXPECT_EQ(loss_forward<T>(h.view(), weight.view(), targets, nullptr, precision).nll, sum.nll);
    return {{static_cast<T>(sum.nll)}, nll};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>&, const Values<T>& before) const {
    const Strided<T> h(rows(), dim, in[0]);
    const Strided<T> weight(vocab, dim, in[1]);
    Strided<T> dh(rows(), dim);
    Strided<T> dweight(vocab, dim, before[1]);
    const LossSum sum =
        loss_backward<T>(h.view(), weight.view(), targets, T(scale), dh.mat(), dweight.mat(), precision);
    EXPECT_EQ(sum.nll, loss_forward<T>(h.view(), weight.view(), targets, nullptr, precision).nll);
    EXPECT_EQ(sum.count, count());
    return {dh.values(), dweight.values()};
  }
};

std::vector<int32_t> random_targets(int64_t rows, int64_t vocab, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> out(static_cast<size_t>(rows));
  for (int32_t& t : out)
    t = random.below(4) == 0 ? -1 : static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab)));
  return out;
}

// The gradient that backward computes is scale times that of the sum; check_op's weights are random, so it is compared
// here.
void check_gradients(const CrossEntropyOp& op) {
  Random random(5);
  const Values<double> in = op.inputs(random);
  const Values<double> weights{{op.scale}, std::vector<double>(op.targets.size(), 0.0)};
  const Values<double> before{{}, random_values(random, op.vocab * op.dim)};
  const Values<double> got = op.backward<double>(in, {}, before);
  const Values<float> got_float = op.backward<float>(cast<float>(in), {}, cast<float>(before));
  std::vector<double> dw = finite_difference(op, in, weights, 1);
  for (size_t i = 0; i < dw.size(); ++i) dw[i] += before[1][i];
  expect_close(got[0], finite_difference(op, in, weights, 0), 1e-8, "dh");
  expect_close(got[1], dw, 1e-8, "dweight");
  expect_close(got_float[0], got[0], 1e-5, "float dh");
  expect_close(got_float[1], got[1], 1e-5, "float dweight");
}

TEST(CrossEntropy, ValuesAndGradients) {
  for (int64_t vocab : {1, 7, 24, 65}) {
    const CrossEntropyOp op{5, vocab, random_targets(6, vocab, static_cast<uint64_t>(vocab))};
    Random random(2);
    const Values<double> in = op.inputs(random);
    const Values<double> want = op.formula(in);
    for (size_t o = 0; o < want.size(); ++o) {
      expect_close(op.forward<double>(in)[o], want[o], 1e-13, "double");
      expect_close(op.forward<float>(cast<float>(in))[o], want[o], 2e-6, "float");
    }
    check_gradients(op);
  }
}

TEST(CrossEntropy, NothingScored) {
  for (const std::vector<int32_t>& targets : std::vector<std::vector<int32_t>>{{}, {-1, -1, -1}}) {
    const CrossEntropyOp op{5, 9, targets};
    Random random(2);
    const Values<double> in = op.inputs(random);
    EXPECT_EQ(op.forward<double>(in)[0][0], 0.0);
    const Values<double> before{{}, std::vector<double>(45, 1.0)};
    const Values<double> got = op.backward<double>(in, {}, before);
    EXPECT_EQ(got[0], std::vector<double>(targets.size() * 5, 0.0));
    EXPECT_EQ(got[1], before[1]);
  }
}

TEST(CrossEntropy, SeveralSlices) {
  const CrossEntropyOp op{8, 33, random_targets(2500, 33, 4)};
  Random random(2);
  const Values<double> in = op.inputs(random);
  expect_close(op.forward<double>(in)[1], op.position_nll(in), 1e-13, "nll");
  EXPECT_NEAR(op.forward<float>(cast<float>(in))[0][0] / op.formula(in)[0][0], 1.0, 1e-6);
  // Gradient rows do not depend on the other slices; that of W is their sum.
  const Values<double> zero{{}, std::vector<double>(33 * 8, 0.0)};
  const Values<double> all = op.backward<double>(in, {}, zero);
  std::vector<double> dh;
  std::vector<double> dw(33 * 8, 0.0);
  for (int64_t begin = 0; begin < 2500; begin += 100) {
    const CrossEntropyOp part{8, 33,
                              std::vector<int32_t>(op.targets.begin() + begin, op.targets.begin() + begin + 100)};
    const Values<double> some = part.backward<double>(
        {std::vector<double>(in[0].begin() + begin * 8, in[0].begin() + (begin + 100) * 8), in[1]}, {}, zero);
    dh.insert(dh.end(), some[0].begin(), some[0].end());
    for (size_t i = 0; i < dw.size(); ++i) dw[i] += some[1][i];
  }
  expect_close(all[0], dh, 1e-13, "dh");
  expect_close(all[1], dw, 1e-12, "dweight");
}

TEST(CrossEntropy, Bf16IsCloseToFloat) {
  CrossEntropyOp op{16, 65, random_targets(300, 65, 6)};
  Random random(2);
  const Values<double> in = op.inputs(random);
  op.precision = Precision::kBf16;
  // Operands keep 8 bits: relative errors of 2^-9 each, of logits of deviation 4 summed over 16 terms.
  expect_close(op.forward<float>(cast<float>(in))[1], op.position_nll(in), 0.01, "nll");
  const Values<float> before{{}, std::vector<float>(65 * 16, 0.0F)};
  const Values<float> got = op.backward<float>(cast<float>(in), {}, before);
  op.precision = Precision::kNative;
  const Values<double> want = op.backward<double>(in, {}, {{}, std::vector<double>(65 * 16, 0.0)});
  expect_close(got[0], want[0], 0.02, "dh");
  expect_close(got[1], want[1], 0.02, "dweight");
}

TEST(CrossEntropy, LargeLogitsStayFinite) {
  const std::vector<float> h{1000.0F, -1000.0F};
  const std::vector<float> weight{1.0F, -1.0F, 0.5F};
  const std::vector<int32_t> targets{0, 0};
  std::vector<float> nll(2);
  std::vector<float> dh(2);
  std::vector<float> dweight(3, 0.0F);
  loss_forward<float>({h.data(), 2, 1}, {weight.data(), 3, 1}, targets, nll.data());
  EXPECT_EQ(nll[0], 0.0F);
  EXPECT_EQ(nll[1], 2000.0F);
  loss_backward<float>({h.data(), 2, 1}, {weight.data(), 3, 1}, targets, 1.0F, {dh.data(), 2, 1},
                       {dweight.data(), 3, 1});
  EXPECT_EQ(dh[0], 0.0F);
  EXPECT_EQ(dh[1], -2.0F);
}

TEST(CrossEntropy, NanAndInfinityReachTheLoss) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (int64_t vocab : {3, 40}) {
      const std::vector<float> h{1.0F};
      std::vector<float> weight(static_cast<size_t>(vocab), 0.5F);
      weight[1] = bad;
      const std::vector<int32_t> targets{0};
      const LossSum sum = loss_forward<float>({h.data(), 1, 1}, {weight.data(), vocab, 1}, targets, nullptr);
      EXPECT_FALSE(std::isfinite(sum.nll)) << bad << " in a vocabulary of " << vocab;
    }
  }
}

TEST(CrossEntropy, BitsDoNotDependOnThreads) {
  for (Precision precision : {Precision::kNative, Precision::kBf16}) {
    const CrossEntropyOp op{24, 65, random_targets(2100, 65, 8), precision};
    check_threads(op, "cross entropy");
  }
}

TEST(CrossEntropy, ScratchIsGivenBack) {
  const CrossEntropyOp op{4, 300, random_targets(40, 300, 1)};
  Random random(2);
  const Values<double> in = op.inputs(random);
  Arena& scratch = host_exec<double>().arena;
  double* first = scratch.alloc<double>(10);
  const Arena::Mark mark = scratch.mark();
  loss_forward<double>({in[0].data(), 40, 4}, {in[1].data(), 300, 4}, op.targets, nullptr);
  EXPECT_EQ(scratch.mark().block, mark.block);
  EXPECT_EQ(scratch.mark().used, mark.used);
  EXPECT_NE(first, nullptr);
}

}  // namespace
}  // namespace fw::testing
