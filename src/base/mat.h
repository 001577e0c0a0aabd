// Mat: a view of a row-major matrix with a row stride; the shape language of src/ops. It owns nothing.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#pragma nv_diag_suppress 554  // Mat<const T> converts to itself, which nobody calls
#endif

namespace fw {

template <class T>
struct Mat {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next, >= cols

  Mat() = default;
  Mat(T* d, int64_t r, int64_t c) : data(d), rows(r), cols(c), stride(c) {}
  Mat(T* d, int64_t r, int64_t c, int64_t s) : data(d), rows(r), cols(c), stride(s) {}
  // Mat<float> converts to Mat<const float>.
  operator Mat<const T>() const { return {data, rows, cols, stride}; }

  T* row(int64_t i) const { return data + i * stride; }
  Mat row_range(int64_t begin, int64_t count) const { return {row(begin), count, cols, stride}; }
  Mat col_range(int64_t begin, int64_t count) const { return {data + begin, rows, count, stride}; }
};

}  // namespace fw
