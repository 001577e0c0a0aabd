// Parameters of a head as gates of every token (Comba's inner decay and read correction): a few values a token, so
// plain loops; sums over tokens in double, in order, whatever the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

template <class T>
std::vector<T> sigmoids(const T* s, int64_t group, int64_t cols) {
  std::vector<T> out(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) out[static_cast<size_t>(c)] = T(1) / (T(1) + std::exp(-s[c / group]));
  return out;
}

constexpr int64_t kColumns = 32;  // of a task's sums

// sum over t of dy[t, c] (times x[t, c]), in double, in order: a task owns columns, so that the bits do not depend on
// the threads.
template <class T>
std::vector<double> column_sums(Mat<const T> dy, const Mat<const T>* x) {
  std::vector<double> sums(static_cast<size_t>(dy.cols));
  parallel_for((dy.cols + kColumns - 1) / kColumns, [&](int64_t task) {
    const int64_t end = std::min(dy.cols, (task + 1) * kColumns);
    for (int64_t t = 0; t < dy.rows; ++t) {
      for (int64_t c = task * kColumns; c < end; ++c) {
        const double weight = x == nullptr ? 1.0 : static_cast<double>(x->row(t)[c]);
        sums[static_cast<size_t>(c)] += static_cast<double>(dy.row(t)[c]) * weight;
      }
    }
  });
  return sums;
}

// body(t) for every row, on all threads.
template <class Body>
void for_rows(int64_t rows, int64_t cols, const Body& body) {
  for_row_blocks(RowBlocks::cut(rows, cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) body(t);
  });
}

}  // namespace

namespace cpu {

template <class T>
void head_scale_forward(const Exec<T>&, Mat<const T> x, const T* s, int64_t group, Mat<T> y) {
  const std::vector<T> factor = sigmoids(s, group, x.cols);
  for_rows(x.rows, x.cols, [&](int64_t t) {
    for (int64_t c = 0; c < x.cols; ++c) y.row(t)[c] = factor[static_cast<size_t>(c)] * x.row(t)[c];
  });
}

template <class T>
void head_scale_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx, T* ds) {
  const std::vector<T> factor = sigmoids(s, group, x.cols);
  for_rows(x.rows, x.cols, [&](int64_t t) {
    for (int64_t c = 0; c < x.cols; ++c) dx.row(t)[c] += factor[static_cast<size_t>(c)] * dy.row(t)[c];
  });
  const std::vector<double> sums = column_sums(dy, &x);
  for (int64_t c = 0; c < x.cols; ++c) {
    const T f = factor[static_cast<size_t>(c)];
    ds[c / group] += static_cast<T>(sums[static_cast<size_t>(c)]) * f * (T(1) - f);
  }
}

template <class T>
void head_constant_forward(const Exec<T>&, const T* s, int64_t group, Mat<T> y) {
  for_rows(y.rows, y.cols, [&](int64_t t) {
    for (int64_t c = 0; c < y.cols; ++c) y.row(t)[c] = s[c / group];
  });
}

template <class T>
void head_constant_backward(const Exec<T>&, Mat<const T> dy, int64_t group, T* ds) {
  const std::vector<double> sums = column_sums<T>(dy, nullptr);
  for (int64_t c = 0; c < dy.cols; ++c) ds[c / group] += static_cast<T>(sums[static_cast<size_t>(c)]);
}

template <class T>
void head_add_forward(const Exec<T>&, Mat<const T> x, const T* s, int64_t group, Mat<T> y) {
  for_rows(x.rows, x.cols, [&](int64_t t) {
    for (int64_t c = 0; c < x.cols; ++c) y.row(t)[c] += s[c / group] * x.row(t)[c];
  });
}

template <class T>
void head_add_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx,
                       T* ds) {
  head_add_forward(exec, dy, s, group, dx);
  const std::vector<double> sums = column_sums(dy, &x);
  for (int64_t c = 0; c < x.cols; ++c) ds[c / group] += static_cast<T>(sums[static_cast<size_t>(c)]);
}

template <class T>
void head_subtract_forward(const Exec<T>&, Mat<const T> x, const T* s, int64_t group, Mat<T> y) {
  for_rows(x.rows, x.cols, [&](int64_t t) {
    for (int64_t c = 0; c < x.cols; ++c) y.row(t)[c] -= s[c / group] * x.row(t)[c];
  });
}

template <class T>
void head_subtract_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx,
                            T* ds) {
  head_subtract_forward(exec, dy, s, group, dx);
  const std::vector<double> sums = column_sums(dy, &x);
  for (int64_t c = 0; c < x.cols; ++c) ds[c / group] -= static_cast<T>(sums[static_cast<size_t>(c)]);
}

template <class T>
void group_mean_forward(const Exec<T>&, Mat<const T> x, Mat<T> y) {
  const int64_t group = x.data != nullptr ? x.cols / y.cols : 0;
  for_rows(y.rows, y.cols * std::max<int64_t>(group, 1), [&](int64_t t) {
    for (int64_t c = 0; c < y.cols; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < group; ++i) sum += x.row(t)[c * group + i];
      y.row(t)[c] = group > 0 ? sum / static_cast<T>(group) : T(0);
    }
  });
}

template <class T>
void group_mean_backward(const Exec<T>&, Mat<const T> dy, Mat<T> dx) {
  if (dx.data == nullptr) return;
  const int64_t group = dx.cols / dy.cols;
  for_rows(dx.rows, dx.cols, [&](int64_t t) {
    for (int64_t c = 0; c < dx.cols; ++c) dx.row(t)[c] += dy.row(t)[c / group] / static_cast<T>(group);
  });
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void head_scale_forward<T>(const Exec<T>&, Mat<const T>, const T*, int64_t, Mat<T>);                       \
  template void head_scale_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, T*);    \
  template void head_constant_forward<T>(const Exec<T>&, const T*, int64_t, Mat<T>);                                  \
  template void head_constant_backward<T>(const Exec<T>&, Mat<const T>, int64_t, T*);                                 \
  template void head_add_forward<T>(const Exec<T>&, Mat<const T>, const T*, int64_t, Mat<T>);                         \
  template void head_add_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, T*);      \
  template void head_subtract_forward<T>(const Exec<T>&, Mat<const T>, const T*, int64_t, Mat<T>);                    \
  template void head_subtract_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, T*); \
  template void group_mean_forward<T>(const Exec<T>&, Mat<const T>, Mat<T>);                                          \
  template void group_mean_backward<T>(const Exec<T>&, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
