// Linear layers: y = x W^T + bias, dx = dy W, dW += dy^T x, db += sum of dy. The products are the library's
// (base/gemm.h, bf16_linear.h); here a precision is chosen and biases are added.
#include "ops/cpu/linear.h"

#include <type_traits>

#include "base/gemm.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/small_m.h"

namespace fw {
namespace {

Mat<float> rounded_values(Mat<const float> x, LocalScratch& scratch) {
  const Mat<float> out(scratch.alloc<float>(x.rows * x.cols), x.rows, x.cols);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    round_to_bf16_values(x.row_range(begin, end - begin), out.row_range(begin, end - begin));
  });
  return out;
}

Mat<float> widened_values(Mat<const Bf16> x, LocalScratch& scratch) {
  const Mat<float> out(scratch.alloc<float>(x.rows * x.cols), x.rows, x.cols);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) widen_bf16(x.cols, x.row(row), out.row(row));
  });
  return out;
}

template <class T>
T beta_of(Write write) {
  return write == Write::kAccumulate ? T(1) : T(0);
}

template <class T>
void add_bias(const T* bias, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(y.rows, y.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* row = y.row(t);
      for (int64_t c = 0; c < y.cols; ++c) row[c] += bias[c];
    }
  });
}

template <class T>
void add_column_sums(Mat<const T> dy, T* dbias) {
  const RowBlocks blocks = RowBlocks::cut(dy.rows, dy.cols);
  PartialSums<T> partial(blocks.count(), dy.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* sums = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      const T* row = dy.row(t);
      for (int64_t c = 0; c < dy.cols; ++c) sums[c] += row[c];
    }
  });
  partial.add_to(dbias);
}

}  // namespace

template <class T>
LinearProducts<T>::LinearProducts(Weight<T> weight, Precision precision) : values_(weight.values) {
  if constexpr (std::is_same_v<T, float>) {
    const bool is_bf16 = weight.values.data == nullptr;
    if (is_bf16) rounded_ = weight.rounded;
    if (precision == Precision::kNative) return;
    way_ = bf16_products_supported() ? Bf16Way::kLibrary : Bf16Way::kRoundedValues;
    if (way_ == Bf16Way::kLibrary) {
      rounded_ = weight.rounded.data != nullptr ? weight.rounded : Mat<const Bf16>(bf16_copy(weight.values, scratch_));
    } else {
      values_ = is_bf16 ? widened_values(rounded_, scratch_) : rounded_values(weight.values, scratch_);
    }
  }
}

template <class T>
void LinearProducts<T>::forward(Mat<const T> x, Mat<T> y, Write write) {
  if (x.rows == 0) return;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kLibrary) {
      if (tiles_trans_.empty()) tiles_trans_ = bf16_tiles(Trans::kYes, rounded_, scratch_);
      return bf16_linear_forward(x, tiles_trans_, y, write == Write::kAccumulate);
    }
  }
  LocalScratch scratch;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kRoundedValues) x = rounded_values(x, scratch);
    if (values_.data == nullptr)
      return gemm_parallel_bf16(x.rows, rounded_.rows, x.cols, 1, x.data, x.stride, rounded_.data,
                                beta_of<float>(write), y.data, y.stride);
  }
  gemm_parallel(Trans::kNo, Trans::kYes, x.rows, values_.rows, x.cols, T(1), x.data, x.stride, values_.data,
                values_.stride, beta_of<T>(write), y.data, y.stride);
}

template <class T>
void LinearProducts<T>::backward(Mat<const T> dy, Mat<const T> x, Mat<T> dx, Mat<T> dweight, Write write) {
  if (dy.rows == 0) return;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kLibrary) {
      if (dx.data != nullptr && tiles_.empty()) tiles_ = bf16_tiles(Trans::kNo, rounded_, scratch_);
      return bf16_linear_backward(dy, x, tiles_, dx, dweight, write == Write::kAccumulate);
    }
  }
  LocalScratch scratch;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kRoundedValues) {
      dy = rounded_values(dy, scratch);
      if (dweight.data != nullptr) x = rounded_values(x, scratch);
    }
  }
  if (dx.data != nullptr) {
    Mat<const T> values = values_;
    if constexpr (std::is_same_v<T, float>) {
      if (values.data == nullptr) values = widened_values(rounded_, scratch);
    }
    gemm_parallel(Trans::kNo, Trans::kNo, dy.rows, values.cols, dy.cols, T(1), dy.data, dy.stride, values.data,
                  values.stride, beta_of<T>(write), dx.data, dx.stride);
  }
  if (dweight.data != nullptr) {
    gemm_parallel(Trans::kYes, Trans::kNo, dweight.rows, dweight.cols, dy.rows, T(1), dy.data, dy.stride, x.data,
                  x.stride, T(1), dweight.data, dweight.stride);
  }
}

template class LinearProducts<float>;
template class LinearProducts<double>;

namespace cpu {

template <class T>
void linear_forward(const Exec<T>& exec, Mat<const T> x, Weight<T> weight, const T* bias, Mat<T> y, Write write) {
  if (x.rows == 0) return;
  if (x.rows <= kSmallM || exec.decode_bits) {
    small_m_product(x, weight, y, exec.precision, write == Write::kAccumulate);
  } else {
    LinearProducts<T>(weight, exec.precision).forward(x, y, write);
  }
  if (bias != nullptr) add_bias(bias, y);
}

template <class T>
void linear_add_forward(const Exec<T>& exec, Mat<const T> x, Weight<T> weight, Mat<const T> addend, Mat<T> y) {
  for (int64_t t = 0; t < y.rows; ++t) std::copy_n(addend.row(t), y.cols, y.row(t));
  linear_forward<T>(exec, x, weight, nullptr, y, Write::kAccumulate);
}

template <class T>
void linear_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Weight<T> weight, Mat<T> dx, Mat<T> dweight,
                     T* dbias, Write write) {
  if (dx.data != nullptr || dweight.data != nullptr)
    LinearProducts<T>(weight, exec.precision).backward(dy, x, dx, dweight, write);
  if (dbias != nullptr) add_column_sums(dy, dbias);
}

template void linear_forward(const Exec<float>&, Mat<const float>, Weight<float>, const float*, Mat<float>, Write);
template void linear_forward(const Exec<double>&, Mat<const double>, Weight<double>, const double*, Mat<double>, Write);
template void linear_add_forward(const Exec<float>&, Mat<const float>, Weight<float>, Mat<const float>, Mat<float>);
template void linear_add_forward(const Exec<double>&, Mat<const double>, Weight<double>, Mat<const double>,
                                 Mat<double>);
template void linear_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Weight<float>, Mat<float>,
                              Mat<float>, float*, Write);
template void linear_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Weight<double>, Mat<double>,
                              Mat<double>, double*, Write);

}  // namespace cpu
}  // namespace fw
