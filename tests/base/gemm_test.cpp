#include "base/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/own_gemm.h"
#include "base/random.h"
#include "base/threads.h"

namespace fw {
namespace {

struct Shape {
  int64_t m, n, k;
};

template <class T>
class GemmTest : public ::testing::Test {
 protected:
  using Function = void (*)(Trans, Trans, int64_t, int64_t, int64_t, T, const T*, int64_t, const T*, int64_t, T, T*,
                            int64_t);

  static std::vector<T> random_values(int64_t count, uint64_t seed) {
    Random random(seed);
    std::vector<T> values(static_cast<size_t>(count));
    for (T& v : values) v = static_cast<T>(random.normal());
    return values;
  }

  // One product by one of the functions against three loops in double; the padding of C must stay as it is.
  static void check(Trans ta, Trans tb, const Shape& s, T alpha, T beta, Function tested) {
    const int64_t lda = (ta == Trans::kNo ? s.k : s.m) + 3, ldb = (tb == Trans::kNo ? s.n : s.k) + 1, ldc = s.n + 2;
    const auto a = random_values((ta == Trans::kNo ? s.m : s.k) * lda, 1);
    const auto b = random_values((tb == Trans::kNo ? s.k : s.n) * ldb, 2);
    const auto before = random_values(s.m * ldc, 3);
    auto c = before;
    if (beta == T(0)) {
      // What was in C must not be read: not-a-number would stay.
      for (int64_t i = 0; i < s.m; ++i) {
        for (int64_t j = 0; j < s.n; ++j) c[static_cast<size_t>(i * ldc + j)] = std::numeric_limits<T>::quiet_NaN();
      }
    }
    tested(ta, tb, s.m, s.n, s.k, alpha, a.data(), lda, b.data(), ldb, beta, c.data(), ldc);
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        double sum = 0, size = 0;
        for (int64_t l = 0; l < s.k; ++l) {
          const double product =
              static_cast<double>(a[static_cast<size_t>(ta == Trans::kNo ? i * lda + l : l * lda + i)]) *
              static_cast<double>(b[static_cast<size_t>(tb == Trans::kNo ? l * ldb + j : j * ldb + l)]);
          sum += product;
          size += std::abs(product);
        }
        const double old = static_cast<double>(before[static_cast<size_t>(i * ldc + j)]);
        const double expected = static_cast<double>(alpha) * sum + static_cast<double>(beta) * old;
        const double bound = std::numeric_limits<T>::epsilon() * (static_cast<double>(s.k) + 4) *
                             (std::abs(static_cast<double>(alpha)) * size + std::abs(old) + 1e-300);
        ASSERT_NEAR(c[static_cast<size_t>(i * ldc + j)], expected, bound)
            << i << "," << j << " of " << s.m << "x" << s.n << "x" << s.k;
      }
      for (int64_t j = s.n; j < ldc; ++j)
        ASSERT_EQ(c[static_cast<size_t>(i * ldc + j)], before[static_cast<size_t>(i * ldc + j)]) << "padding";
    }
  }
};

using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(GemmTest, Types);

TYPED_TEST(GemmTest, AgainstThreeLoops) {
  for (const Trans ta : {Trans::kNo, Trans::kYes}) {
    for (const Trans tb : {Trans::kNo, Trans::kYes}) {
      for (const Shape& s :
           {Shape{1, 1, 1}, Shape{5, 7, 3}, Shape{16, 64, 33}, Shape{1, 100, 40}, Shape{70, 1, 9}, Shape{4, 5, 0}}) {
        for (const TypeParam beta : {TypeParam(0), TypeParam(1), TypeParam(-0.5)})
          this->check(ta, tb, s, TypeParam(1.5), beta, gemm);
      }
    }
  }
}

TYPED_TEST(GemmTest, InTilesOnAllThreads) {
  for (const Trans ta : {Trans::kNo, Trans::kYes}) {
    for (const Trans tb : {Trans::kNo, Trans::kYes}) {
      // Below, at and above the tile sizes, rows and columns.
      for (const Shape& s :
           {Shape{3, 5, 7}, Shape{130, 513, 5}, Shape{1025, 20, 6}, Shape{33, 1030, 4}, Shape{64, 512, 0}}) {
        this->check(ta, tb, s, TypeParam(1), TypeParam(0), gemm_parallel);
        this->check(ta, tb, s, TypeParam(-2), TypeParam(1), gemm_parallel);
      }
    }
  }
}

// Rows of 512 numbers, of one operand or both, which are copied apart 256 at a time.
TYPED_TEST(GemmTest, RowsThatMeetInTheCache) {
  for (const Shape& s : {Shape{509, 5, 300}, Shape{509, 3, 256}, Shape{509, 3, 512}, Shape{509, 511, 9},
                         Shape{509, 511, 1}, Shape{6, 511, 300}}) {
    for (const TypeParam beta : {TypeParam(0), TypeParam(-0.5)})
      this->check(Trans::kYes, Trans::kNo, s, TypeParam(1.5), beta, gemm_parallel);
  }
}

// What a build without oneDNN and OpenBLAS multiplies with: rows that fill no block of four, columns that fill no
// vector.
TYPED_TEST(GemmTest, OwnProductsAgainstThreeLoops) {
  for (const Trans ta : {Trans::kNo, Trans::kYes}) {
    for (const Trans tb : {Trans::kNo, Trans::kYes}) {
      for (const Shape& s : {Shape{1, 1, 1}, Shape{5, 7, 3}, Shape{16, 64, 33}, Shape{1, 100, 40}, Shape{70, 1, 9},
                             Shape{64, 128, 64}, Shape{63, 81, 128}}) {
        for (const TypeParam beta : {TypeParam(0), TypeParam(1), TypeParam(-0.5)})
          this->check(ta, tb, s, TypeParam(1.5), beta, own_gemm);
      }
    }
  }
}

TYPED_TEST(GemmTest, NothingToDo) {
  TypeParam c = 7;
  gemm(Trans::kNo, Trans::kNo, 0, 4, 4, TypeParam(1), &c, 4, &c, 4, TypeParam(0), &c, 4);
  gemm_parallel(Trans::kNo, Trans::kNo, 4, 0, 4, TypeParam(1), &c, 4, &c, 4, TypeParam(0), &c, 4);
  EXPECT_EQ(c, TypeParam(7));
}

TYPED_TEST(GemmTest, TheSameBitsWithAnyNumberOfThreads) {
  const Shape s{300, 700, 90};
  const auto a = this->random_values(s.m * s.k, 4), b = this->random_values(s.k * s.n, 5);
  std::vector<TypeParam> first;
  for (const int threads : {1, 2, 3, 5}) {
    set_num_threads(threads);
    std::vector<TypeParam> c(static_cast<size_t>(s.m * s.n));
    gemm_parallel(Trans::kNo, Trans::kNo, s.m, s.n, s.k, TypeParam(1), a.data(), s.k, b.data(), s.n, TypeParam(0),
                  c.data(), s.n);
    if (first.empty()) first = c;
    EXPECT_EQ(std::memcmp(first.data(), c.data(), c.size() * sizeof(TypeParam)), 0) << threads << " threads";
  }
  set_num_threads(0);
}

}  // namespace
}  // namespace fw
