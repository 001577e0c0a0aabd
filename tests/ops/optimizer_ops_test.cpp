// The optimiser's operations over pieces of flat buffers: the sum of squares and the AdamW update, against plain loops
// in double.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

// Pieces with gaps between them, of sizes 0, 1, odd and long; every other one decays. Gaps hold NaN.
struct Flat {
  std::vector<ParamPiece> pieces;
  int64_t size = 0;

  Flat() {
    for (int32_t count : {1, 0, 7, 64, 16383, 65, 4096}) {
      pieces.push_back({size, count, static_cast<int32_t>(pieces.size() % 2)});
      size += count + 5;
    }
  }
  ParamPieces view() const { return {pieces.data(), static_cast<int64_t>(pieces.size())}; }

  template <class T>
  std::vector<T> values(uint64_t seed, double deviation, bool positive = false) const {
    Random random(seed);
    std::vector<T> out(static_cast<size_t>(size), std::numeric_limits<T>::quiet_NaN());
    for (const ParamPiece& piece : pieces) {
      for (int64_t i = piece.begin; i < piece.begin + piece.count; ++i) {
        const double value = deviation * random.normal();
        out[static_cast<size_t>(i)] = static_cast<T>(static_cast<float>(positive ? std::abs(value) : value));
      }
    }
    return out;
  }
};

template <class T>
void check_square_sum() {
  const Flat flat;
  const std::vector<T> x = flat.values<T>(1, 3.0);
  long double exact = 0;
  for (T v : x) exact += std::isnan(v) ? 0.0L : static_cast<long double>(v) * static_cast<long double>(v);
  const double want = static_cast<double>(exact);
  std::vector<double> sums;
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    double sum = -1;
    host_ops<T>().square_sum(host_exec<T>(), x.data(), flat.view(), &sum);
    EXPECT_NEAR(sum / want, 1.0, 1e-14);
    sums.push_back(sum);
  }
  EXPECT_EQ(sums[0], sums[1]) << "threads change the sum";
  double nothing = -1;
  host_ops<T>().square_sum(host_exec<T>(), x.data(), {}, &nothing);
  EXPECT_EQ(nothing, 0.0);
}

TEST(SquareSum, InDoubleWithAnyThreads) {
  check_square_sum<float>();
  check_square_sum<double>();
}

// Of bf16 numbers, which are widened exactly: the sum of the same numbers as floats, to the bit; what is not finite
// shows.
TEST(SquareSum, OfBf16NumbersIsThatOfTheirFloats) {
  const Flat flat;
  std::vector<float> x = flat.values<float>(1, 3.0);
  std::vector<Bf16> rounded(x.size());
  round_to_bf16(static_cast<int64_t>(x.size()), x.data(), rounded.data());
  widen_bf16(static_cast<int64_t>(x.size()), rounded.data(), x.data());
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    double sum = -1, want = -2;
    host_ops<float>().bf16_square_sum(host_exec<float>(), rounded.data(), flat.view(), &sum);
    host_ops<float>().square_sum(host_exec<float>(), x.data(), flat.view(), &want);
    EXPECT_GT(want, 0);
    EXPECT_EQ(sum, want);
  }
  double nothing = -1;
  host_ops<float>().bf16_square_sum(host_exec<float>(), rounded.data(), {}, &nothing);
  EXPECT_EQ(nothing, 0.0);
  rounded[static_cast<size_t>(flat.pieces[4].begin + 777)].bits = 0x7f80;
  host_ops<float>().bf16_square_sum(host_exec<float>(), rounded.data(), flat.view(), &nothing);
  EXPECT_FALSE(std::isfinite(nothing));
}

TEST(SquareSum, OneValueThatIsNotFiniteShows) {
  const Flat flat;
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x = flat.values<float>(1, 3.0);
    x[static_cast<size_t>(flat.pieces[4].begin + 777)] = bad;
    double sum = 0;
    host_ops<float>().square_sum(host_exec<float>(), x.data(), flat.view(), &sum);
    EXPECT_FALSE(std::isfinite(sum)) << bad;
  }
}

// The formula of ops.def for update t of three, where the moments start at what the step before left.
template <class T>
void check_adamw(double tolerance) {
  const Flat flat;
  const double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, lr = 3e-3, decay = 0.1, grad_scale = 0.25;
  std::vector<Values<T>> by_threads;
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    std::vector<T> p = flat.values<T>(2, 0.5);
    std::vector<T> m = flat.values<T>(3, 0.0);
    std::vector<T> v = flat.values<T>(3, 0.0);
    std::vector<double> want_p(p.begin(), p.end()), want_m(m.begin(), m.end()), want_v(v.begin(), v.end());
    for (int t = 1; t <= 3; ++t) {
      const std::vector<T> g = flat.values<T>(static_cast<uint64_t>(t) + 10, 2.0);
      AdamWStep<T> step;
      step.beta1 = static_cast<T>(beta1);
      step.one_minus_beta1 = static_cast<T>(1 - beta1);
      step.beta2 = static_cast<T>(beta2);
      step.one_minus_beta2 = static_cast<T>(1 - beta2);
      step.eps = static_cast<T>(eps);
      step.grad_scale = static_cast<T>(grad_scale);
      step.step = static_cast<T>(lr / (1 - std::pow(beta1, t)));
      step.inv_sqrt_debias2 = static_cast<T>(1 / std::sqrt(1 - std::pow(beta2, t)));
      step.decay = static_cast<T>(lr * decay);
      host_ops<T>().adamw(host_exec<T>(), step, flat.view(), g.data(), ParamValues<T>{p.data()},
                          MomentValues<T>{m.data(), v.data()});
      for (const ParamPiece& piece : flat.pieces) {
        for (size_t i = static_cast<size_t>(piece.begin); i < static_cast<size_t>(piece.begin + piece.count); ++i) {
          const double grad = grad_scale * static_cast<double>(g[i]);
          want_m[i] = beta1 * want_m[i] + (1 - beta1) * grad;
          want_v[i] = beta2 * want_v[i] + (1 - beta2) * grad * grad;
          const double root = std::sqrt(want_v[i] / (1 - std::pow(beta2, t))) + eps;
          want_p[i] -=
              lr * (want_m[i] / (1 - std::pow(beta1, t)) / root + (piece.decay != 0 ? decay : 0.0) * want_p[i]);
        }
      }
    }
    const auto compare = [&](const std::vector<T>& got, const std::vector<double>& want, const char* what) {
      for (size_t i = 0; i < want.size(); ++i) {
        if (std::isnan(want[i])) {
          ASSERT_TRUE(std::isnan(got[i])) << what << ": wrote between the pieces, at " << i;
        } else {
          ASSERT_NEAR(static_cast<double>(got[i]), want[i], tolerance) << what << " at " << i;
        }
      }
    };
    compare(p, want_p, "values");
    compare(m, want_m, "m");
    compare(v, want_v, "v");
    by_threads.push_back({p, m, v});
  }
  EXPECT_TRUE(same_bits(by_threads[0], by_threads[1])) << "threads change the update";
}

TEST(AdamW, TheFormulaWithAnyThreads) {
  check_adamw<double>(1e-14);
  check_adamw<float>(1e-6);
}

}  // namespace
}  // namespace fw::testing
