// y = x W^T for a handful of rows (decoding): bound by reading W once, which a library's blocked product does not do
// well. More rows take it for the bits that they have alone (Exec::decode_bits).
#pragma once

#include "ops/ops.h"

namespace fw {

constexpr int64_t kSmallM = 4;

// y [T, out] = (accumulate ? y : 0) + x [T, in] W^T; W [out, in]. With kBf16 (float only) both operands are rounded on
// the way. A row's bits do not depend on the other rows.
void small_m_product(Mat<const float> x, Mat<const float> weight, Mat<float> y, Precision precision, bool accumulate);
void small_m_product(Mat<const double> x, Mat<const double> weight, Mat<double> y, Precision precision,
                     bool accumulate);

}  // namespace fw
