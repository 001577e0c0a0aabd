// Rows that move as they are, and values that are rounded, added or exponentiated one by one.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {

template <class T>
void copy_rows(const Exec<T>&, Mat<const T> from, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(from.rows, from.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      std::memcpy(to.row(t), from.row(t), static_cast<size_t>(from.cols) * sizeof(T));
  });
}

template <class T>
void add_rows(const Exec<T>&, Mat<const T> from, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(from.rows, from.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < from.cols; ++c) to.row(t)[c] += from.row(t)[c];
    }
  });
}

template <class T>
void subtract_rows(const Exec<T>&, Mat<const T> from, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(from.rows, from.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < from.cols; ++c) to.row(t)[c] -= from.row(t)[c];
    }
  });
}

template <class T>
void last_rows(const Exec<T>&, Mat<const T> from, const PassLayout& layout, Mat<T> to) {
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    std::memcpy(to.row(n), from.row(layout.host.end(n) - 1), static_cast<size_t>(from.cols) * sizeof(T));
  }
}

template <class T>
void gather_rows(const Exec<T>&, Mat<const T> from, const int32_t* rows, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(to.rows, to.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to.row(i), from.row(rows[i]), static_cast<size_t>(to.cols) * sizeof(T));
  });
}

template <class T>
void scatter_rows(const Exec<T>&, Mat<const T> from, const int32_t* rows, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(from.rows, from.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to.row(rows[i]), from.row(i), static_cast<size_t>(from.cols) * sizeof(T));
  });
}

template <class T>
void round_values(const Exec<T>&, const T* from, int64_t n, Bf16* to) {
  for_row_blocks({n, 16384}, [&](int64_t, int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, float>) {
      round_to_bf16(end - begin, from + begin, to + begin);
    } else {
      for (int64_t i = begin; i < end; ++i) {
        const float value = static_cast<float>(from[i]);
        round_to_bf16(1, &value, to + i);
      }
    }
  });
}

template <class T>
void add_values(const Exec<T>&, const T* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

template <class T>
void exp_values_forward(const Exec<T>&, const T* x, int64_t n, T* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = std::exp(x[i]);
}

template <class T>
void exp_values_backward(const Exec<T>&, const T* dy, const T* y, int64_t n, T* dx) {
  for (int64_t i = 0; i < n; ++i) dx[i] += dy[i] * y[i];
}

#define FW_INSTANTIATE(T)                                                           \
  template void copy_rows(const Exec<T>&, Mat<const T>, Mat<T>);                    \
  template void add_rows(const Exec<T>&, Mat<const T>, Mat<T>);                     \
  template void subtract_rows(const Exec<T>&, Mat<const T>, Mat<T>);                \
  template void last_rows(const Exec<T>&, Mat<const T>, const PassLayout&, Mat<T>); \
  template void gather_rows(const Exec<T>&, Mat<const T>, const int32_t*, Mat<T>);  \
  template void scatter_rows(const Exec<T>&, Mat<const T>, const int32_t*, Mat<T>); \
  template void round_values(const Exec<T>&, const T*, int64_t, Bf16*);             \
  template void add_values(const Exec<T>&, const T*, int64_t, T*);                  \
  template void exp_values_forward(const Exec<T>&, const T*, int64_t, T*);          \
  template void exp_values_backward(const Exec<T>&, const T*, const T*, int64_t, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
