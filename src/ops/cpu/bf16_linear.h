// The products of a linear layer with bf16 operands: rounding, packing and the cut into tasks. The weight's operands
// are prepared once (bf16_tiles) and used by any number of products.
#pragma once

#include <vector>

#include "ops/cpu/bf16.h"

namespace fw {

// An operand [k, n] as packed tiles of kBf16TileCols columns. A product of one tile writes its result in place, those
// of more go by way of a copy (bf16_gemm_packed).
using Bf16Tiles = std::vector<Bf16Packed>;
constexpr int64_t kBf16TileCols = 4096;

// W [out, in] rounded; memory of the scratch.
Mat<Bf16> bf16_copy(Mat<const float> x, LocalScratch& scratch);
// Tiles of W^T (kYes: for y = x W^T) or of W (kNo: for dx = dy W), from W rounded.
Bf16Tiles bf16_tiles(Trans trans, Mat<const Bf16> weight, LocalScratch& scratch);

// y [T, out] = (accumulate ? y : 0) + x W^T
void bf16_linear_forward(Mat<const float> x, const Bf16Tiles& weight_trans, Mat<float> y, bool accumulate);
// dx = (accumulate ? dx : 0) + dy W unless dx.data is null; dweight += dy^T x unless dweight.data is null.
void bf16_linear_backward(Mat<const float> dy, Mat<const float> x, const Bf16Tiles& weight, Mat<float> dx,
                          Mat<float> dweight, bool accumulate);

}  // namespace fw
