// Rounding of whole matrices to bfloat16, beside the products of base/bf16_gemm.h, for Precision::kBf16.
#pragma once

#include <cstdint>

#include "base/bf16_gemm.h"
#include "base/mat.h"
#include "ops/cpu/row_blocks.h"

namespace fw {

// out [rows, cols] of any stride; on the calling thread.
inline void round_to_bf16(Mat<const float> x, Mat<Bf16> out) {
  for (int64_t t = 0; t < x.rows; ++t) round_to_bf16(x.cols, x.row(t), out.row(t));
}
inline void round_to_bf16_values(Mat<const float> x, Mat<float> out) {
  for (int64_t t = 0; t < x.rows; ++t) round_to_bf16_values(x.cols, x.row(t), out.row(t));
}

}  // namespace fw
