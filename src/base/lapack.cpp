#include "base/lapack.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/blas_library.h"
#include "base/error.h"
#include "base/threads.h"

namespace fw {
namespace {

std::vector<double> checked_copy(const char* what, int64_t m, int64_t n, std::span<const double> a) {
  if (static_cast<int64_t>(a.size()) != m * n)
    fail_internal("{}: expected {} x {} values, got {}", what, m, n, a.size());
  for (const double x : a) {
    if (!std::isfinite(x)) fail_numeric("{}: expected finite values, got {}", what, x);
  }
  return {a.begin(), a.end()};
}

// Inside a task OpenBLAS keeps to one thread (base/threads.h).
template <class Body>
void on_one_thread(const Body& body) {
  if (inside_task()) {
    body();
  } else {
    parallel_for(1, [&](int64_t) { body(); });
  }
}

// `call(work, size, info)` is asked for the size it likes first.
template <class Call>
void with_workspace(const char* what, const Call& call) {
  on_one_thread([&] {
    double best = 0;
    int info = 0;
    call(&best, -1, &info);
    std::vector<double> work(static_cast<size_t>(std::max(best, 1.0)));
    if (info == 0) call(work.data(), static_cast<int>(work.size()), &info);
    if (info != 0) fail_numeric("{}: LAPACK ended with info = {}", what, info);
  });
}

}  // namespace

std::vector<double> singular_values(int64_t m, int64_t n, std::span<const double> a) {
  std::vector<double> copy = checked_copy("singular values", m, n, a);
  std::vector<double> values(static_cast<size_t>(std::min(m, n)));
  if (values.empty()) return values;
  const int rows = static_cast<int>(n), cols = static_cast<int>(m), one = 1;  // column-major: the transpose
  with_workspace("singular values", [&](double* work, int size, int* info) {
    blas_library().dgesvd("N", "N", &rows, &cols, copy.data(), &rows, values.data(), nullptr, &one, nullptr, &one, work,
                          &size, info, 1, 1);
  });
  return values;
}

void solve_positive(int64_t n, std::span<double> a, std::span<double> x) {
  if (static_cast<int64_t>(a.size()) != n * n || static_cast<int64_t>(x.size()) != n) {
    fail_internal("solve: expected {} x {} and {} values, got {} and {}", n, n, n, a.size(), x.size());
  }
  if (n == 0) return;
  const int order = static_cast<int>(n), one = 1;
  int info = 0;
  on_one_thread([&] { blas_library().dposv("U", &order, &one, a.data(), &order, x.data(), &order, &info, 1); });
  if (info != 0) fail_numeric("solve: expected a positive definite matrix, LAPACK ended with info = {}", info);
}

SymmetricEigen symmetric_eigen(int64_t n, std::span<const double> a) {
  SymmetricEigen result{std::vector<double>(static_cast<size_t>(n)), checked_copy("eigenvalues", n, n, a)};
  if (n == 0) return result;
  const int order = static_cast<int>(n);
  with_workspace("eigenvalues", [&](double* work, int size, int* info) {
    blas_library().dsyev("V", "U", &order, result.vectors.data(), &order, result.values.data(), work, &size, info, 1,
                         1);
  });
  // LAPACK gives them in ascending order, vectors as columns of a column-major matrix: as our rows.
  std::reverse(result.values.begin(), result.values.end());
  for (int64_t i = 0; i < n / 2; ++i) {
    std::swap_ranges(result.vectors.begin() + i * n, result.vectors.begin() + (i + 1) * n,
                     result.vectors.begin() + (n - 1 - i) * n);
  }
  return result;
}

}  // namespace fw
