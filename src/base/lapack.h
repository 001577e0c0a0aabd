// Decompositions of small matrices in double, by the LAPACK inside OpenBLAS, on the calling thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fw {

// Singular values, largest first, of a row-major matrix [m, n] (or of its transpose: they are the same).
// Error(kNumeric) when an element is not finite.
std::vector<double> singular_values(int64_t m, int64_t n, std::span<const double> a);

// Eigenvalues, largest first, and eigenvectors of a symmetric matrix [n, n]; row i of `vectors` [n, n] belongs to value
// i.
struct SymmetricEigen {
  std::vector<double> values;
  std::vector<double> vectors;
};
SymmetricEigen symmetric_eigen(int64_t n, std::span<const double> a);

// x = A^-1 x for a symmetric positive definite A [n, n], by Cholesky; A is used up. Error(kNumeric) where A is not
// positive definite. May run inside a task.
void solve_positive(int64_t n, std::span<double> a, std::span<double> x);

}  // namespace fw
