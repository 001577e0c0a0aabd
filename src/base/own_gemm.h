// Matrix products without a library, for builds that bring none (the Python wheel: oneDNN and OpenBLAS are 75 MB, and
// OpenBLAS brings an OpenMP runtime beside the one of PyTorch). Always built, so that the tests of every build see it;
// gemm() takes it where FW_BLAS is OFF.
#pragma once

#include <cstdint>

#include "base/gemm.h"

namespace fw {

// What the kernels are given: element (i, l) of op(A) lies at a[i * step_i + l * step_l], B has k rows of n, ldb apart.
template <class T>
struct OwnProduct {
  int64_t n, k;
  T alpha;
  const T* a;
  int64_t step_i, step_l;
  const T* b;
  int64_t ldb;
  T beta;
  T* c;
  int64_t ldc;
};

// As gemm() for m, n, k >= 1, on the calling thread, inside a task or not.
void own_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
              const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
void own_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, double alpha, const double* a, int64_t lda,
              const double* b, int64_t ldb, double beta, double* c, int64_t ldc);

}  // namespace fw
