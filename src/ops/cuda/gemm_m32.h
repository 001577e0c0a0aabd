// Products of up to 32 rows: see gemm_m64.h, whose functions call these.
#pragma once

#include <cstdint>

#include "base/mat.h"
#include "ops/ops.h"

namespace fw::cuda {

// The most rows that gemm_m32_linear takes.
inline constexpr int64_t kGemmM32MaxM = 32;

// takes_gemm_m64() of 1 to kGemmM32MaxM rows.
bool takes_gemm_m32(Mat<const Bf16> x, Mat<const Bf16> weight);

// Blocks that share the columns of a weight [out, in], a power of two up to 8. By the weight's shape alone: they are
// part of the bits.
int gemm_m32_slices(int64_t out, int64_t in);

// As gemm_m64_linear(), gemm_m64_pair() and gemm_m64_swiglu(): shapes, types and what is read when.
void gemm_m32_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     void* stream);
bool gemm_m32_pair(const LinearPart<Bf16>& first, const LinearPart<Bf16>& second, void* stream);
void gemm_m32_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, void* stream);

}  // namespace fw::cuda
