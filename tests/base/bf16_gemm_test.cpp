// oneDNN's bf16 products against three loops, in every form that the engine asks for. Which of the library's kernels
// runs depends on the machine: AMX, AVX-512 with and without bf16 of its own.
#include "base/bf16_gemm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/bf16_check.h"
#include "base/random.h"
#include "base/threads.h"

namespace fw {
namespace {

struct Shape {
  int64_t m, n, k;
};

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = static_cast<float>(random.normal());
  round_to_bf16_values(count, values.data(), values.data());
  return values;
}

std::vector<Bf16> rounded(const std::vector<float>& values) {
  std::vector<Bf16> out(values.size());
  round_to_bf16(static_cast<int64_t>(values.size()), values.data(), out.data());
  return out;
}

// One product against three loops in double; the padding of C must stay as it is. What is wrong first, or nothing.
std::string first_wrong(Trans ta, Trans tb, const Shape& s, bool accumulate, bool packed, int64_t gap) {
  const int64_t lda = (ta == Trans::kNo ? s.k : s.m) + gap, ldb = (tb == Trans::kNo ? s.n : s.k) + gap, ldc = s.n + gap;
  const std::vector<float> a = random_values((ta == Trans::kNo ? s.m : s.k) * lda, 1),
                           b = random_values((tb == Trans::kNo ? s.k : s.n) * ldb, 2);
  const std::vector<float> before = random_values(s.m * ldc, 3);
  std::vector<float> c = before;
  if (!accumulate) {
    for (int64_t i = 0; i < s.m; ++i) {  // what was in C must not be read: not-a-number would stay
      for (int64_t j = 0; j < s.n; ++j) c[static_cast<size_t>(i * ldc + j)] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  const std::vector<Bf16> a_bits = rounded(a), b_bits = rounded(b);
  parallel_for(1, [&](int64_t) {
    if (packed) {
      LocalScratch scratch;
      bf16_gemm_packed(s.m, a_bits.data(), lda, pack_bf16(tb, s.n, s.k, b_bits.data(), ldb, scratch), accumulate,
                       c.data(), ldc);
    } else {
      bf16_gemm(ta, tb, s.m, s.n, s.k, a_bits.data(), lda, b_bits.data(), ldb, accumulate, c.data(), ldc);
    }
  });
  const auto wrong = [&](int64_t i, int64_t j, double expected) {
    return fmt::format("{},{} of {}x{}x{}{}{}{}{}, gap {}: expected {}, got {}", i, j, s.m, s.n, s.k,
                       ta == Trans::kYes ? ", A transposed" : "", tb == Trans::kYes ? ", B transposed" : "",
                       accumulate ? ", added" : "", packed ? ", packed" : "", gap, expected,
                       c[static_cast<size_t>(i * ldc + j)]);
  };
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      const double old = accumulate ? static_cast<double>(before[static_cast<size_t>(i * ldc + j)]) : 0.0;
      double sum = old, size = std::abs(old);
      for (int64_t l = 0; l < s.k; ++l) {
        const double product =
            static_cast<double>(a[static_cast<size_t>(ta == Trans::kNo ? i * lda + l : l * lda + i)]) *
            static_cast<double>(b[static_cast<size_t>(tb == Trans::kNo ? l * ldb + j : j * ldb + l)]);
        sum += product;
        size += std::abs(product);
      }
      const double bound =
          static_cast<double>(std::numeric_limits<float>::epsilon()) * (static_cast<double>(s.k) + 4) * (size + 1e-300);
      if (!(std::abs(static_cast<double>(c[static_cast<size_t>(i * ldc + j)]) - sum) <= bound)) return wrong(i, j, sum);
    }
    for (int64_t j = s.n; j < ldc; ++j) {
      const float kept = before[static_cast<size_t>(i * ldc + j)];
      if (c[static_cast<size_t>(i * ldc + j)] != kept) return wrong(i, j, static_cast<double>(kept));
    }
  }
  return "";
}

// Rows, columns and depths that fill no tile of any kernel, one that fill several, and those of small models. A machine
// whose library has a wrong product does not use it: there the test is skipped, and says which.
class Bf16Products : public ::testing::TestWithParam<Shape> {
 protected:
  static void expect_right(const std::vector<Trans>& left, bool packed) {
    if (!bf16_products_exist()) GTEST_SKIP() << "oneDNN multiplies no bf16 on this machine";
    for (const Trans ta : left) {
      for (const Trans tb : {Trans::kNo, Trans::kYes}) {
        for (const bool accumulate : {false, true}) {
          for (const int64_t gap : {0, 3, 32}) {
            const std::string wrong = first_wrong(ta, tb, GetParam(), accumulate, packed, gap);
            if (!wrong.empty() && !bf16_products_supported())
              GTEST_SKIP() << "oneDNN's products are wrong on this machine and not used: " << wrong;
            ASSERT_EQ(wrong, "");
          }
        }
      }
    }
  }
};

TEST_P(Bf16Products, PlainAgainstThreeLoops) { expect_right({Trans::kNo, Trans::kYes}, false); }

TEST_P(Bf16Products, PackedAgainstThreeLoops) { expect_right({Trans::kNo}, true); }

INSTANTIATE_TEST_SUITE_P(Shapes, Bf16Products,
                         ::testing::Values(Shape{1, 1, 1}, Shape{5, 7, 3}, Shape{16, 64, 33}, Shape{1, 100, 40},
                                           Shape{70, 1, 9}, Shape{64, 64, 64}, Shape{63, 81, 127}, Shape{48, 128, 20},
                                           Shape{130, 96, 512}),
                         [](const ::testing::TestParamInfo<Shape>& shape) {
                           return std::to_string(shape.param.m) + "x" + std::to_string(shape.param.n) + "x" +
                                  std::to_string(shape.param.k);
                         });

// A library's product that is wrong in one form and one element, and one that is right.
template <class Spoil>
void three_loops(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda, const Bf16* b,
                 int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  const auto value = [](const Bf16& x) {
    float wide = 0;
    widen_bf16(1, &x, &wide);
    return wide;
  };
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = accumulate ? c[i * ldc + j] : 0.0F;
      for (int64_t l = 0; l < k; ++l)
        sum += value(a[ta == Trans::kNo ? i * lda + l : l * lda + i]) *
               value(b[tb == Trans::kNo ? l * ldb + j : j * ldb + l]);
      c[i * ldc + j] = sum;
    }
  }
  Spoil()(ta, tb, accumulate, c[(m - 1) * ldc + n - 1]);
}

struct Nothing {
  void operator()(Trans, Trans, bool, float&) const {}
};
struct TransposedAndAdded {
  void operator()(Trans ta, Trans tb, bool accumulate, float& c) const {
    c += ta == Trans::kYes && tb == Trans::kNo && accumulate ? 1.0F : 0.0F;
  }
};
struct PackedTransposed {
  void operator()(Trans, Trans tb, bool, float& c) const { c += tb == Trans::kYes ? 1.0F : 0.0F; }
};

TEST(Bf16Check, FindsAWrongFormOfEitherProduct) {
  EXPECT_TRUE(bf16_products_are_right(three_loops<Nothing>, three_loops<Nothing>));
  EXPECT_FALSE(bf16_products_are_right(three_loops<TransposedAndAdded>, three_loops<Nothing>));
  EXPECT_FALSE(bf16_products_are_right(three_loops<Nothing>, three_loops<PackedTransposed>));
}

}  // namespace
}  // namespace fw
