// y = x W^T for a handful of rows (decoding): bound by reading W once, which a library's blocked product does not do
// well.
#pragma once

#include "ops/ops.h"

namespace fw {

constexpr int64_t kSmallM = 4;

// y [T, out] = (accumulate ? y : 0) + x [T, in] W^T, T <= kSmallM; W [out, in]. With kBf16 (float only) both operands
// are rounded on the way. A row's bits do not depend on the other rows.
void small_m_product(Mat<const float> x, Mat<const float> weight, Mat<float> y, Precision precision, bool accumulate);
// The same bits from a weight in bf16.
void small_m_product(Mat<const float> x, Mat<const Bf16> weight, Mat<float> y, Precision precision, bool accumulate);
void small_m_product(Mat<const double> x, Mat<const double> weight, Mat<double> y, Precision precision,
                     bool accumulate);

}  // namespace fw
