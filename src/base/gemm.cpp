#include "base/gemm.h"

#if defined(FW_BLAS)
#include <oneapi/dnnl/dnnl.h>

#include "base/blas_library.h"
#else
#include "base/own_gemm.h"
#endif

#include <algorithm>
#include <type_traits>

#include "base/error.h"
#include "base/local_scratch.h"
#include "base/threads.h"

namespace fw {
namespace {

#if defined(FW_BLAS)
void product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
             const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const dnnl_status_t status = dnnl_sgemm(ta == Trans::kNo ? 'N' : 'T', tb == Trans::kNo ? 'N' : 'T', m, n, k, alpha, a,
                                          lda, b, ldb, beta, c, ldc);
  if (status != dnnl_success) fail_internal("dnnl_sgemm {}x{}x{}: status {}", m, n, k, static_cast<int>(status));
}

void product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
             const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  blas_library().dgemm(CblasRowMajor, ta == Trans::kNo ? CblasNoTrans : CblasTrans,
                       tb == Trans::kNo ? CblasNoTrans : CblasTrans, static_cast<int>(m), static_cast<int>(n),
                       static_cast<int>(k), alpha, a, static_cast<int>(lda), b, static_cast<int>(ldb), beta, c,
                       static_cast<int>(ldc));
}
#else
template <class T>
void product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda, const T* b,
             int64_t ldb, T beta, T* c, int64_t ldc) {
  own_gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
#endif

template <class T>
void scale_only(int64_t m, int64_t n, T beta, T* c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == T(0) ? T(0) : beta * c[i * ldc + j];
  }
}

// body(first row, first column, rows, columns) for tiles of C [m, n] on all threads.
template <class Body>
void for_tiles(int64_t m, int64_t n, const Body& body) {
  // Tall products (activations) are cut by rows, weight gradients (small m, n; large k) by both. A tile of 256 x 512
  // keeps its operands in L2 and is large enough for the library to reach its speed.
  const int64_t tile_m = m >= 1024 ? 256 : std::max<int64_t>(32, (m + 3) / 4 + 15 - ((m + 3) / 4 + 15) % 16);
  const int64_t tile_n = 512;
  const int64_t tiles_m = (m + tile_m - 1) / tile_m;
  const int64_t tiles_n = (n + tile_n - 1) / tile_n;
  parallel_for(tiles_m * tiles_n, [&](int64_t tile) {
    const int64_t i = tile / tiles_n * tile_m;
    const int64_t j = tile % tiles_n * tile_n;
    body(i, j, std::min(tile_m, m - i), std::min(tile_n, n - j));
  });
}

// Rows of 2 KB or a multiple of it that are read as columns meet in a few sets of the first-level cache: oneDNN's
// product of A^T then takes up to 2.5 times as long. Such rows are copied apart, as many at a time as stay in L2.
constexpr int64_t kCopiedRows = 256, kApart = 16;
bool rows_meet(int64_t stride) { return stride % 512 == 0; }
const float* copied_apart(const float* from, int64_t stride, int64_t rows, int64_t cols, float* to) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * stride, cols, to + r * (cols + kApart));
  return to;
}

// C = alpha A^T B + beta C of a tile, for rows of A that meet.
void gemm_of_copies(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
                    int64_t ldb, float beta, float* c, int64_t ldc) {
  LocalScratch scratch;
  float* const a_rows = scratch.alloc<float>(kCopiedRows * (m + kApart));
  float* const b_rows = rows_meet(ldb) ? scratch.alloc<float>(kCopiedRows * (n + kApart)) : nullptr;
  for (int64_t first = 0; first < k; first += kCopiedRows) {
    const int64_t rows = std::min(kCopiedRows, k - first);
    const float* const b_part = b + first * ldb;
    gemm(Trans::kYes, Trans::kNo, m, n, rows, alpha, copied_apart(a + first * lda, lda, rows, m, a_rows), m + kApart,
         b_rows != nullptr ? copied_apart(b_part, ldb, rows, n, b_rows) : b_part, b_rows != nullptr ? n + kApart : ldb,
         first == 0 ? beta : 1.0F, c, ldc);
  }
}

template <class T>
void gemm_tiles(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda, const T* b,
                int64_t ldb, T beta, T* c, int64_t ldc) {
  if (k <= 0) return scale_only(m, n, beta, c, ldc);  // a and b may be null
  for_tiles(m, n, [&](int64_t i, int64_t j, int64_t rows, int64_t cols) {
    if constexpr (std::is_same_v<T, float>) {
      if (ta == Trans::kYes && tb == Trans::kNo && rows_meet(lda))
        return gemm_of_copies(rows, cols, k, alpha, a + i, lda, b + j, ldb, beta, c + i * ldc + j, ldc);
    }
    gemm(ta, tb, rows, cols, k, alpha, ta == Trans::kNo ? a + i * lda : a + i, lda,
         tb == Trans::kNo ? b + j : b + j * ldb, ldb, beta, c + i * ldc + j, ldc);
  });
}

void check_product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc) {
  const auto fits = [](int64_t ld, int64_t columns) { return ld >= columns && ld <= kMostLeading; };
  if (std::max({m, n, k}) <= kMostLeading && fits(lda, ta == Trans::kNo ? k : m) &&
      fits(ldb, tb == Trans::kNo ? n : k) && fits(ldc, n))
    return;
  fail_internal("product {}x{}x{}: expected leading dimensions from the columns of a row to {}, got {}, {} and {}", m,
                n, k, kMostLeading, lda, ldb, ldc);
}

}  // namespace

void gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) return scale_only(m, n, beta, c, ldc);
  if (!inside_task())
    return parallel_for(1, [&](int64_t) { gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); });
  check_product(ta, tb, m, n, k, lda, ldb, ldc);
  product(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
          const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) return scale_only(m, n, beta, c, ldc);
  if (!inside_task())
    return parallel_for(1, [&](int64_t) { gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); });
  check_product(ta, tb, m, n, k, lda, ldb, ldc);
  product(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm_parallel(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                   const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  gemm_tiles(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm_parallel(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
                   const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  gemm_tiles(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm_parallel_bf16(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const Bf16* b,
                        float beta, float* c, int64_t ldc) {
  if (k <= 0) return scale_only(m, n, beta, c, ldc);
  for_tiles(m, n, [&](int64_t i, int64_t j, int64_t rows, int64_t cols) {
    LocalScratch scratch;
    float* wide = scratch.alloc<float>(cols * k);
    widen_bf16(cols * k, b + j * k, wide);
    gemm(Trans::kNo, Trans::kYes, rows, cols, k, alpha, a + i * lda, lda, wide, k, beta, c + i * ldc + j, ldc);
  });
}

}  // namespace fw
