// Parameters of a head as gates of every token (Comba's inner decay and read correction): a few values a token, so plain
// loops; sums over tokens in double, in order, whatever the number of threads.
#include <cmath>
#include <vector>

#include "ops/ops.h"

namespace fw {
namespace {

template <class T>
std::vector<T> sigmoids(const T* s, int64_t group, int64_t n) {
  std::vector<T> y(static_cast<size_t>(n));
  for (int64_t c = 0; c < n; ++c) y[static_cast<size_t>(c)] = T(1) / (T(1) + std::exp(-s[c / group]));
  return y;
}

// sum over tokens of dy x, a column each; x may be absent (1).
template <class T>
std::vector<double> column_sums(Mat<const T> dy, const Mat<const T>* x) {
  std::vector<double> sums(static_cast<size_t>(dy.cols), 0.0);
  for (int64_t t = 0; t < dy.rows; ++t) {
    const T* d = dy.row(t);
    const T* v = x != nullptr ? x->row(t) : nullptr;
    for (int64_t c = 0; c < dy.cols; ++c) sums[static_cast<size_t>(c)] += static_cast<double>(d[c]) * (v != nullptr ? static_cast<double>(v[c]) : 1.0);
  }
  return sums;
}

}  // namespace

template <class T>
void head_scale_forward(Mat<const T> x, const T* s, int64_t group, Mat<T> y) {
  const std::vector<T> factor = sigmoids(s, group, x.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t c = 0; c < x.cols; ++c) y.row(t)[c] = factor[static_cast<size_t>(c)] * x.row(t)[c];
  }
}

template <class T>
void head_scale_backward(Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx, T* ds) {
  const std::vector<T> factor = sigmoids(s, group, x.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t c = 0; c < x.cols; ++c) dx.row(t)[c] += factor[static_cast<size_t>(c)] * dy.row(t)[c];
  }
  const std::vector<double> sums = column_sums(dy, &x);
  for (int64_t c = 0; c < x.cols; ++c) {
    const T f = factor[static_cast<size_t>(c)];
    ds[c / group] += static_cast<T>(sums[static_cast<size_t>(c)]) * f * (T(1) - f);
  }
}

template <class T>
void head_constant_forward(const T* s, int64_t group, Mat<T> y) {
  for (int64_t t = 0; t < y.rows; ++t) {
    for (int64_t c = 0; c < y.cols; ++c) y.row(t)[c] = s[c / group];
  }
}

template <class T>
void head_constant_backward(Mat<const T> dy, int64_t group, T* ds) {
  const std::vector<double> sums = column_sums<T>(dy, nullptr);
  for (int64_t c = 0; c < dy.cols; ++c) ds[c / group] += static_cast<T>(sums[static_cast<size_t>(c)]);
}

template <class T>
void head_subtract_forward(Mat<const T> x, const T* s, int64_t group, Mat<T> y) {
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t c = 0; c < x.cols; ++c) y.row(t)[c] -= s[c / group] * x.row(t)[c];
  }
}

template <class T>
void head_subtract_backward(Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx, T* ds) {
  head_subtract_forward(dy, s, group, dx);
  const std::vector<double> sums = column_sums(dy, &x);
  for (int64_t c = 0; c < x.cols; ++c) ds[c / group] -= static_cast<T>(sums[static_cast<size_t>(c)]);
}

template <class T>
void group_mean_forward(Mat<const T> x, Mat<T> y) {
  const int64_t group = x.data != nullptr ? x.cols / y.cols : 0;
  for (int64_t t = 0; t < y.rows; ++t) {
    for (int64_t c = 0; c < y.cols; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < group; ++i) sum += x.row(t)[c * group + i];
      y.row(t)[c] = group > 0 ? sum / static_cast<T>(group) : T(0);
    }
  }
}

template <class T>
void group_mean_backward(Mat<const T> dy, Mat<T> dx) {
  if (dx.data == nullptr) return;
  const int64_t group = dx.cols / dy.cols;
  for (int64_t t = 0; t < dx.rows; ++t) {
    for (int64_t c = 0; c < dx.cols; ++c) dx.row(t)[c] += dy.row(t)[c / group] / static_cast<T>(group);
  }
}

#define FW_INSTANTIATE(T)                                                                             \
  template void head_scale_forward<T>(Mat<const T>, const T*, int64_t, Mat<T>);                       \
  template void head_scale_backward<T>(Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, T*);    \
  template void head_constant_forward<T>(const T*, int64_t, Mat<T>);                                  \
  template void head_constant_backward<T>(Mat<const T>, int64_t, T*);                                 \
  template void head_subtract_forward<T>(Mat<const T>, const T*, int64_t, Mat<T>);                    \
  template void head_subtract_backward<T>(Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, T*); \
  template void group_mean_forward<T>(Mat<const T>, Mat<T>);                                          \
  template void group_mean_backward<T>(Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw
