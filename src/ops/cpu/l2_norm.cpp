// Vectors of unit length, head by head: y = x f, f = 1 / sqrt(|x|^2 + eps);  dx = f dy - f^3 (x.dy) x.
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {

template <class T>
void l2_norm_forward(const Exec<T>&, Mat<const T> x, int64_t dim, T eps, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < x.cols; first += dim) {
        const T* in = x.row(t) + first;
        T square = eps;
        for (int64_t i = 0; i < dim; ++i) square += in[i] * in[i];
        const T factor = T(1) / std::sqrt(square);
        for (int64_t i = 0; i < dim; ++i) y.row(t)[first + i] = factor * in[i];
      }
    }
  });
}

template <class T>
void l2_norm_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, int64_t dim, T eps, Mat<T> dx) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < x.cols; first += dim) {
        const T* in = x.row(t) + first;
        const T* grad = dy.row(t) + first;
        T square = eps, dot = 0;
        for (int64_t i = 0; i < dim; ++i) {
          square += in[i] * in[i];
          dot += in[i] * grad[i];
        }
        const T factor = T(1) / std::sqrt(square), along = factor * factor * factor * dot;
        for (int64_t i = 0; i < dim; ++i) dx.row(t)[first + i] = factor * grad[i] - along * in[i];
      }
    }
  });
}

#define FW_INSTANTIATE(T)                                                             \
  template void l2_norm_forward<T>(const Exec<T>&, Mat<const T>, int64_t, T, Mat<T>); \
  template void l2_norm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, int64_t, T, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
