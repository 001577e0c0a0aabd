// Blocks of 4 rows by 2 vectors of C stay in registers while k runs. Made for the recurrence's products: a chunk by a
// head's width, whose operands fit the second cache, so nothing else is blocked; a transposed B is copied once so that
// its rows are contiguous. See own_gemm.h.
#include "base/own_gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/own_gemm.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "base/local_scratch.h"

HWY_BEFORE_NAMESPACE();
namespace fw::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <int kRows, int kVectors, class T>
void block(const OwnProduct<T>& p, int64_t i, int64_t j) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> sums[kRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = hn::Zero(d);
  }
  const T* a = p.a + i * p.step_i;
  const T* b = p.b + j;
  for (int64_t l = 0; l < p.k; ++l, a += p.step_l, b += p.ldb) {
    hn::Vec<decltype(d)> columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, a[r * p.step_i]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, columns[v], sums[r][v]);
    }
  }
  const auto alpha = hn::Set(d, p.alpha), beta = hn::Set(d, p.beta);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      T* c = p.c + (i + r) * p.ldc + j + v * lanes;
      const auto product = hn::Mul(alpha, sums[r][v]);
      hn::StoreU(p.beta == T(0) ? product : hn::MulAdd(beta, hn::LoadU(d, c), product), d, c);
    }
  }
}

// The columns that fill no vector.
template <class T>
void columns_one_by_one(const OwnProduct<T>& p, int64_t i, int64_t rows, int64_t j) {
  for (int64_t r = i; r < i + rows; ++r) {
    for (int64_t column = j; column < p.n; ++column) {
      T sum = 0;
      for (int64_t l = 0; l < p.k; ++l) sum += p.a[r * p.step_i + l * p.step_l] * p.b[l * p.ldb + column];
      T& c = p.c[r * p.ldc + column];
      c = p.beta == T(0) ? p.alpha * sum : p.alpha * sum + p.beta * c;
    }
  }
}

template <int kRows, class T>
void row_block(const OwnProduct<T>& p, int64_t i) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  int64_t j = 0;
  for (; j + 2 * lanes <= p.n; j += 2 * lanes) block<kRows, 2>(p, i, j);
  for (; j + lanes <= p.n; j += lanes) block<kRows, 1>(p, i, j);
  columns_one_by_one(p, i, kRows, j);
}

template <class T>
void product(int64_t m, const OwnProduct<T>& p) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) row_block<4>(p, i);
  for (; i < m; ++i) row_block<1>(p, i);
}

void product_f32(int64_t m, const OwnProduct<float>& p) { product(m, p); }
void product_f64(int64_t m, const OwnProduct<double>& p) { product(m, p); }

}  // namespace fw::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(product_f32);
HWY_EXPORT(product_f64);

template <class T, class Run>
void run(const Run& kernel, Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda,
         const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  LocalScratch scratch;
  OwnProduct<T> p{n, k, alpha, a, ta == Trans::kNo ? lda : 1, ta == Trans::kNo ? 1 : lda, b, ldb, beta, c, ldc};
  if (tb == Trans::kYes) {
    T* rows = scratch.alloc<T>(k * n);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) rows[l * n + j] = b[j * ldb + l];
    }
    p.b = rows;
    p.ldb = n;
  }
  kernel(m, p);
}

}  // namespace

void own_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
              const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  run(HWY_DYNAMIC_DISPATCH(product_f32), ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void own_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
              const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  run(HWY_DYNAMIC_DISPATCH(product_f64), ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace fw
#endif
