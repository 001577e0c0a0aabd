// The log-decay of gated linear attention: g = scale log s(x + bias) = -scale softplus(-(x + bias)).
//   dx = dg scale s(-(x + bias))
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {

namespace cpu {

template <class T>
void log_sigmoid_decay_forward(const Exec<T>&, Mat<const T> x, const T* bias, T scale, Mat<T> g) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      T* out = g.row(t);
      for (int64_t c = 0; c < x.cols; ++c) {
        const T z = in[c] + bias[c];
        out[c] = scale * (std::min(z, T(0)) - std::log1p(std::exp(-std::abs(z))));  // no exponent above zero
      }
    }
  });
}

template <class T>
void log_sigmoid_decay_backward(const Exec<T>&, Mat<const T> dg, Mat<const T> x, const T* bias, T scale, Mat<T> dx,
                                T* dbias) {
  const RowBlocks blocks = RowBlocks::cut(x.rows, x.cols);
  PartialSums<T> partial(blocks.count(), x.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* sum = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      const T* grad = dg.row(t);
      const T* in = x.row(t);
      T* out = dx.row(t);
      for (int64_t c = 0; c < x.cols; ++c) {
        const T z = in[c] + bias[c];
        const T e = std::exp(-std::abs(z));
        out[c] = grad[c] * scale * (z >= 0 ? e : T(1)) / (T(1) + e);
        sum[c] += out[c];
      }
    }
  });
  partial.add_to(dbias);
}

template void log_sigmoid_decay_forward(const Exec<float>&, Mat<const float>, const float*, float, Mat<float>);
template void log_sigmoid_decay_forward(const Exec<double>&, Mat<const double>, const double*, double, Mat<double>);
template void log_sigmoid_decay_backward(const Exec<float>&, Mat<const float>, Mat<const float>, const float*, float,
                                         Mat<float>, float*);
template void log_sigmoid_decay_backward(const Exec<double>&, Mat<const double>, Mat<const double>, const double*,
                                         double, Mat<double>, double*);

}  // namespace cpu
}  // namespace fw
