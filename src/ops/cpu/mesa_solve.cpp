// The regularised least squares of a Mesa layer, one token after the other (ops.def). H = exp(g) H + beta k k^T in
// double. Then (H + Diag(lambda)) x = rhs is solved by Cholesky (LAPACK) or by conjugate gradients. A task is one head
// of one sequence.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "base/lapack.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// From x = 0 until the residual is at most `tolerance` of the right-hand side, or `steps` steps are done. x comes in as
// the right-hand side.
void conjugate_gradients(const std::vector<double>& a, int64_t steps, double tolerance, std::vector<double>& x) {
  const size_t n = x.size();
  std::vector<double> r = x, p = x, ap(n);
  std::fill(x.begin(), x.end(), 0.0);
  double square = dot(r, r);
  const double enough = tolerance * tolerance * square;
  for (int64_t step = 0; step < steps && square > enough; ++step) {
    for (size_t i = 0; i < n; ++i) {
      ap[i] = 0;
      for (size_t j = 0; j < n; ++j) ap[i] += a[i * n + j] * p[j];
    }
    const double along = square / dot(p, ap);
    for (size_t i = 0; i < n; ++i) {
      x[i] += along * p[i];
      r[i] -= along * ap[i];
    }
    const double next = dot(r, r);
    for (size_t i = 0; i < n; ++i) p[i] = r[i] + next / square * p[i];
    square = next;
  }
}

}  // namespace

namespace cpu {

template <class T>
void mesa_solve(const Exec<T>&, const MesaShape& shape, Mat<const T> rhs, Mat<const T> k, Mat<const T> beta,
                Mat<const T> g, const T* lambda, const PassLayout& layout, const T* state, Mat<T> x) {
  const int64_t K = shape.key_dim, width = shape.value_dim + K;
  const size_t n = static_cast<size_t>(K);
  parallel_for(layout.host.count() * shape.heads, [&](int64_t task) {
    const int64_t sequence = task / shape.heads, head = task % shape.heads, first = head * K;
    std::vector<double> H(n * n, 0.0), a(n * n), y(n);
    if (state != nullptr) {
      const T* rows = state + task * K * width + shape.value_dim;
      for (size_t i = 0; i < n * n; ++i)
        H[i] = static_cast<double>(rows[static_cast<int64_t>(i / n) * width + static_cast<int64_t>(i % n)]);
    }
    for (int64_t t = layout.host.begin(sequence); t < layout.host.end(sequence); ++t) {
      const T* key = k.row(t) + first;
      const double decay = std::exp(static_cast<double>(g.row(t)[head])), gain = static_cast<double>(beta.row(t)[head]);
      for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j)
          H[i * n + j] = decay * H[i * n + j] + gain * static_cast<double>(key[i]) * static_cast<double>(key[j]);
      }
      a = H;
      for (size_t i = 0; i < n; ++i) {
        a[i * n + i] += softplus(static_cast<double>(lambda[first + static_cast<int64_t>(i)])) + shape.least;
        y[i] = static_cast<double>(rhs.row(t)[first + static_cast<int64_t>(i)]);
      }
      if (shape.cg_steps > 0) {
        conjugate_gradients(a, shape.cg_steps, shape.cg_tolerance, y);
      } else {
        solve_positive(K, a, y);
      }
      for (size_t i = 0; i < n; ++i) x.row(t)[first + static_cast<int64_t>(i)] = static_cast<T>(y[i]);
    }
  });
}

template <class T>
void mesa_lambda_backward(const Exec<T>&, Mat<const T> x, Mat<const T> y, const T* lambda, T* dlambda) {
  const RowBlocks blocks = RowBlocks::cut(x.rows, x.cols);
  PartialSums<T> partial(blocks.count(), x.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* sum = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x.cols; ++c) sum[c] += x.row(t)[c] * y.row(t)[c];
    }
  });
  if (x.rows == 0) return;
  const T* sums = partial.total();
  for (int64_t c = 0; c < x.cols; ++c) dlambda[c] -= sums[c] / (T(1) + std::exp(-lambda[c]));
}

#define FW_INSTANTIATE(T)                                                                                 \
  template void mesa_solve<T>(const Exec<T>&, const MesaShape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                              Mat<const T>, const T*, const PassLayout&, const T*, Mat<T>);               \
  template void mesa_lambda_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
