// GroupNorm: y = n weight + bias, n = (x - mean) rstd, of every group of columns; with h = dy weight
//   dx = rstd (h - mean(h) - n mean(h n))     dweight = sum over rows of dy n     dbias = sum over rows of dy
// Sums over a group are taken in double: a variance is what is left of larger numbers.
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

template <class T>
double mean_of(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
  return sum / static_cast<double>(n);
}

}  // namespace

template <class T>
void group_norm_forward(const Exec<T>&, Mat<const T> x, int64_t dim, const T* weight, const T* bias, T eps, Mat<T> y,
                        T* rstd) {
  const int64_t groups = x.cols / dim;
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < groups; ++j) {
        const T* in = x.row(t) + j * dim;
        const double mean = mean_of(in, dim);
        double square = 0;
        for (int64_t i = 0; i < dim; ++i)
          square += (static_cast<double>(in[i]) - mean) * (static_cast<double>(in[i]) - mean);
        const T shift = static_cast<T>(mean),
                r = static_cast<T>(1.0 / std::sqrt(square / static_cast<double>(dim) + static_cast<double>(eps)));
        rstd[t * groups + j] = r;
        T* out = y.row(t) + j * dim;
        for (int64_t i = 0; i < dim; ++i) out[i] = (in[i] - shift) * r * weight[j * dim + i] + bias[j * dim + i];
      }
    }
  });
}

template <class T>
void group_norm_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, int64_t dim, const T* weight, const T* rstd,
                         Mat<T> dx, T* dweight, T* dbias, Write write) {
  const int64_t groups = x.cols / dim;
  const RowBlocks blocks = RowBlocks::cut(x.rows, x.cols);
  PartialSums<T> of_weight(blocks.count(), x.cols), of_bias(blocks.count(), x.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < groups; ++j) {
        const int64_t first = j * dim;
        const T* in = x.row(t) + first;
        const T* grad = dy.row(t) + first;
        T* dw = of_weight.block(block) + first;
        T* db = of_bias.block(block) + first;
        const T shift = static_cast<T>(mean_of(in, dim)), r = rstd[t * groups + j];
        double sum = 0, along = 0;
        for (int64_t i = 0; i < dim; ++i) {
          const T n = (in[i] - shift) * r, h = grad[i] * weight[first + i];
          dw[i] += grad[i] * n;
          db[i] += grad[i];
          sum += static_cast<double>(h);
          along += static_cast<double>(h) * static_cast<double>(n);
        }
        const T mean = static_cast<T>(sum / static_cast<double>(dim)),
                slope = static_cast<T>(along / static_cast<double>(dim));
        T* out = dx.row(t) + first;
        for (int64_t i = 0; i < dim; ++i) {
          const T n = (in[i] - shift) * r, value = r * (grad[i] * weight[first + i] - mean - n * slope);
          out[i] = write == Write::kAccumulate ? out[i] + value : value;
        }
      }
    }
  });
  of_weight.add_to(dweight);
  of_bias.add_to(dbias);
}

#define FW_INSTANTIATE(T)                                                                                        \
  template void group_norm_forward<T>(const Exec<T>&, Mat<const T>, int64_t, const T*, const T*, T, Mat<T>, T*); \
  template void group_norm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, int64_t, const T*, const T*,  \
                                       Mat<T>, T*, T*, Write);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
