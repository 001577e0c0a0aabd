// OpenBLAS, for products and decompositions in double. It is opened when the first of them runs, not with the program:
// its own initialisation never returns where a limit of address space (ulimit -v) leaves too little for the buffers of
// its threads.
#pragma once

#include <cblas.h>

#include <cstddef>
#include <cstdint>

namespace fw {

// LAPACK's routines, for which Debian's OpenBLAS has no header. The last arguments are the lengths of the character
// arguments, as Fortran compilers pass them.
struct BlasLibrary {
  decltype(&::cblas_dgemm) dgemm = nullptr;
  void (*dgesvd)(const char* jobu, const char* jobvt, const int* m, const int* n, double* a, const int* lda, double* s,
                 double* u, const int* ldu, double* vt, const int* ldvt, double* work, const int* lwork, int* info,
                 size_t, size_t) = nullptr;
  void (*dposv)(const char* uplo, const int* n, const int* nrhs, double* a, const int* lda, double* b, const int* ldb,
                int* info, size_t) = nullptr;
  void (*dsyev)(const char* jobz, const char* uplo, const int* n, double* a, const int* lda, double* w, double* work,
                const int* lwork, int* info, size_t, size_t) = nullptr;
};

// Throws Error(kUsage) where the library is not there or the limit of address space leaves too little for it; a later
// call tries again.
const BlasLibrary& blas_library();

// Bytes of address space that OpenBLAS takes when it is opened with so many threads of its own.
uint64_t blas_address_space(int threads);

}  // namespace fw
