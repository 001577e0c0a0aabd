// Matrix products: oneDNN for float, OpenBLAS for double (oneDNN has no double), own ones (own_gemm.h) in
// a build without them. Row-major:
// C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] + beta * C.
#pragma once

#include <cstdint>

#include "base/bf16.h"

namespace fw {

// The largest distance of rows that every library's products take.
inline constexpr int64_t kMostLeading = INT32_MAX;

// lda, ldb, ldc: at least the columns of a row as it is stored, at most kMostLeading; m, n and k at most kMostLeading
// too. Others are an Error(kInternal): the libraries write nothing then, or elsewhere.
enum class Trans { kNo, kYes };

// On the calling thread only. beta == 0 never reads C.
void gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc);
void gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
          const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

// The same cut into fixed tiles of C that run on all threads; the cut depends on the shape only, so the bits do not
// depend on the number of threads.
void gemm_parallel(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                   const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void gemm_parallel(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
                   const double* b, int64_t ldb, double beta, double* c, int64_t ldc);
// C = alpha A B^T + beta C with B [n, k] in bf16, dense; each tile widens its rows of B. The bits are those of the
// product with all of B widened before.
void gemm_parallel_bf16(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const Bf16* b,
                        float beta, float* c, int64_t ldc);

}  // namespace fw
