// Rows that move as they are, bit for bit, and the sum of two vectors.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

template <class T>
std::vector<T> values_of(int64_t n) {
  Random random(3);
  const std::vector<double> v = random_values(random, n);
  return {v.begin(), v.end()};
}

template <class T>
void check_copy() {
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    for (int64_t rows : {0, 1, 5, 3001}) {
      for (int64_t cols : {1, 7, 65}) {
        const std::vector<T> values = values_of<T>(rows * cols);
        const Strided<T> from(rows, cols, values);
        Strided<T> to(rows, cols);
        host_ops<T>().copy_rows(host_exec<T>(), from.view(), to.mat());
        EXPECT_EQ(to.values(), values) << rows << " x " << cols << ", " << threads << " threads";
      }
    }
  }
}

TEST(CopyRows, EveryRowAndNothingBetween) {
  check_copy<float>();
  check_copy<double>();
}

template <class T>
void check_last() {
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    for (const std::vector<int64_t>& offsets : std::vector<std::vector<int64_t>>{{0}, {0, 1}, {0, 1, 2, 9, 67}}) {
      for (int64_t cols : {1, 7, 65}) {
        const SeqLayout layout(offsets);
        const std::vector<T> values = values_of<T>(layout.tokens() * cols);
        const Strided<T> from(layout.tokens(), cols, values);
        Strided<T> to(layout.count(), cols);
        host_ops<T>().last_rows(host_exec<T>(), from.view(), layout, to.mat());
        std::vector<T> want;
        for (size_t n = 1; n < offsets.size(); ++n)
          want.insert(want.end(), values.begin() + (offsets[n] - 1) * cols, values.begin() + offsets[n] * cols);
        EXPECT_EQ(to.values(), want) << layout.count() << " sequences of " << cols << " columns";
      }
    }
  }
}

TEST(LastRows, TheLastTokenOfEverySequence) {
  check_last<float>();
  check_last<double>();
}

template <class T>
void check_chosen() {
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    for (const std::vector<int32_t>& rows : std::vector<std::vector<int32_t>>{{}, {3}, {0, 66, 1, 5}}) {
      for (int64_t cols : {1, 7, 65}) {
        constexpr int64_t kRows = 67;
        const auto count = static_cast<int64_t>(rows.size());
        const std::vector<T> values = values_of<T>(kRows * cols);
        const Strided<T> all(kRows, cols, values);
        Strided<T> chosen(count, cols), back(kRows, cols, std::vector<T>(values.size(), T(42)));
        host_ops<T>().gather_rows(host_exec<T>(), all.view(), rows.data(), chosen.mat());
        host_ops<T>().scatter_rows(host_exec<T>(), chosen.view(), rows.data(), back.mat());
        std::vector<T> want, want_back(values.size(), T(42));
        for (const int32_t row : rows) {
          want.insert(want.end(), values.begin() + row * cols, values.begin() + (row + 1) * cols);
          std::copy_n(values.begin() + row * cols, cols, want_back.begin() + row * cols);
        }
        EXPECT_EQ(chosen.values(), want) << count << " rows of " << cols << " columns";
        EXPECT_EQ(back.values(), want_back) << count << " rows of " << cols << " columns, the others stay";
      }
    }
  }
}

TEST(ChosenRows, AreGatheredAndScattered) {
  check_chosen<float>();
  check_chosen<double>();
}

template <class T>
void check_add() {
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    for (int64_t n : {0, 1, 7, 10001}) {
      const std::vector<T> from = values_of<T>(n);
      std::vector<T> to(from.rbegin(), from.rend());
      std::vector<T> want = to;
      for (size_t i = 0; i < want.size(); ++i) want[i] += from[i];
      to.push_back(T(42));
      want.push_back(T(42));
      host_ops<T>().add_values(host_exec<T>(), from.data(), n, to.data());
      EXPECT_EQ(to, want) << n << " values, the last element is not one of them";
    }
  }
}

TEST(AddValues, EveryValueAndNotTheNext) {
  check_add<float>();
  check_add<double>();
}

template <class T>
void check_exp() {
  for (int64_t n : {0, 1, 7, 1001}) {
    const std::vector<T> x = values_of<T>(n), dy(x.rbegin(), x.rend());
    std::vector<T> y(x.size() + 1, T(42)), dx(x.size() + 1, T(3)), want_y = y, want_dx = dx;
    for (size_t i = 0; i < x.size(); ++i) {
      want_y[i] = std::exp(x[i]);
      want_dx[i] += dy[i] * want_y[i];
    }
    host_ops<T>().exp_values_forward(host_exec<T>(), x.data(), n, y.data());
    host_ops<T>().exp_values_backward(host_exec<T>(), dy.data(), y.data(), n, dx.data());
    EXPECT_EQ(y, want_y) << n << " values, the last element is not one of them";
    EXPECT_EQ(dx, want_dx) << n << " values: the gradient is added";
  }
}

TEST(ExpValues, EveryValueAndNotTheNext) {
  check_exp<float>();
  check_exp<double>();
}

template <class T>
void check_round() {
  for (int threads : {1, 3}) {
    const Threads limit(threads);
    for (int64_t n : {0, 1, 9, 16385, 40000}) {
      const std::vector<T> values = values_of<T>(n);
      std::vector<Bf16> to(static_cast<size_t>(n) + 1, Bf16{7});
      host_ops<T>().round_values(host_exec<T>(), values.data(), n, to.data());
      for (size_t i = 0; i < values.size(); ++i) {
        const float value = static_cast<float>(values[i]);
        Bf16 want;
        round_to_bf16(1, &value, &want);
        ASSERT_EQ(to[i].bits, want.bits) << i << " of " << n;
      }
      EXPECT_EQ(to.back().bits, 7);
    }
  }
}

TEST(RoundValues, EveryValueToTheNearest) {
  check_round<float>();
  check_round<double>();
}

}  // namespace
}  // namespace fw::testing
