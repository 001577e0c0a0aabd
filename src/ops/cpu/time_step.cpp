// The time step of a state-space layer and its decay, head by head: dt = softplus(x + bias), g = -exp(a_log) dt.
//   dx = (d_dt - exp(a_log) dg) sigmoid(x + bias)        da_log = sum dg g
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace cpu {

template <class T>
void time_step_forward(const Exec<T>&, Mat<const T> x, const T* a_log, const T* bias, Mat<T> dt, Mat<T> g) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const T z = x.row(t)[c] + bias[c];
        const T step = std::max(z, T(0)) + std::log1p(std::exp(-std::abs(z)));  // no exponent above zero
        dt.row(t)[c] = step;
        g.row(t)[c] = -std::exp(a_log[c]) * step;
      }
    }
  });
}

template <class T>
void time_step_backward(const Exec<T>&, Mat<const T> d_dt, Mat<const T> dg, Mat<const T> x, const T* a_log,
                        const T* bias, Mat<T> dx, T* da_log, T* dbias) {
  const int64_t n = x.cols;
  const RowBlocks blocks = RowBlocks::cut(x.rows, n);
  PartialSums<T> partial(blocks.count(), 2 * n);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* of_a = partial.block(block);
    T* of_bias = of_a + n;
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < n; ++c) {
        const T z = x.row(t)[c] + bias[c], rate = std::exp(a_log[c]), grad_g = dg.row(t)[c];
        const T e = std::exp(-std::abs(z)), step = std::max(z, T(0)) + std::log1p(e);
        const T grad = (d_dt.row(t)[c] - rate * grad_g) * (z >= 0 ? T(1) : e) / (T(1) + e);
        of_a[c] -= grad_g * rate * step;
        of_bias[c] += grad;
        dx.row(t)[c] = grad;
      }
    }
  });
  if (x.rows == 0) return;
  const T* sums = partial.total();
  for (int64_t c = 0; c < n; ++c) {
    da_log[c] += sums[c];
    dbias[c] += sums[n + c];
  }
}

#define FW_INSTANTIATE(T)                                                                                           \
  template void time_step_forward<T>(const Exec<T>&, Mat<const T>, const T*, const T*, Mat<T>, Mat<T>);             \
  template void time_step_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const T*, const T*, \
                                      Mat<T>, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
