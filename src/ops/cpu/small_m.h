// y = x W^T for a handful of rows (decoding): bound by reading W once, which a library's blocked product does not do
// well. More rows take it for the bits that they have alone (Exec::decode_bits).
#pragma once

#include <type_traits>

#include "ops/ops.h"

namespace fw {

constexpr int64_t kSmallM = 4;

// y [T, out] = (accumulate ? y : 0) + x [T, in] W^T; W [out, in]. With kBf16 (float only) both operands are rounded on
// the way. A row's bits do not depend on the other rows.
void small_m_product(Mat<const float> x, Mat<const float> weight, Mat<float> y, Precision precision, bool accumulate);
// The same bits from a weight in bf16.
void small_m_product(Mat<const float> x, Mat<const Bf16> weight, Mat<float> y, Precision precision, bool accumulate);
void small_m_product(Mat<const double> x, Mat<const double> weight, Mat<double> y, Precision precision,
                     bool accumulate);
// From the values or, where a weight has none, from those in bf16.
template <class T>
void small_m_product(Mat<const T> x, const Weight<T>& weight, Mat<T> y, Precision precision, bool accumulate) {
  if constexpr (std::is_same_v<T, float>) {
    if (weight.values.data == nullptr) return small_m_product(x, weight.rounded, y, precision, accumulate);
  }
  small_m_product(x, weight.values, y, precision, accumulate);
}

}  // namespace fw
