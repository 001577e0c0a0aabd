// y = x W^T of some rows on the device: what a token of 9 to 64 sequences asks of a weight. Bound by the reading of the
// weight, as that of few rows is.
#pragma once

#include <cstdint>

#include "base/mat.h"
#include "ops/ops.h"

namespace fw::cuda {

// The most rows that gemm_m64_linear takes; beyond, a library's product for whole tiles pays.
inline constexpr int64_t kGemmM64MaxM = 64;

// Whether gemm_m64_linear takes them on the current device: 1 to kGemmM64MaxM rows of x, x and the weight in 16-byte
// vectors, warp-group instructions.
bool takes_gemm_m64(Mat<const Bf16> x, Mat<const Bf16> weight);

// Blocks that share the columns of a weight [out, in], a power of two up to 8. By the weight's shape alone: they are
// part of the bits.
int gemm_m64_slices(int64_t out, int64_t in);

// Of both: x [M, in], W [out, in], M at most kGemmM64MaxM. Columns are contiguous, strides free but for what
// takes_gemm_m64() asks for. Sums are float32, rounded once. A row's bits do not depend on the rows alongside it nor on
// how many there are. The weight and the bias are read before the kernel in front is over.
//
// y = x W^T + bias + addend;  y [M, out]; bias [out] or null; addend [M, out], y itself or apart from it, or null.
void gemm_m64_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     void* stream);
// The same of two products of one width, without addends, in one kernel; false, and nothing is done, where
// takes_gemm_m64() says no of one or its columns are in slices.
bool some_rows_pair(const LinearPart<Bf16>& first, const LinearPart<Bf16>& second, void* stream);
// y = silu(x W0^T) (x W1^T), W0 the upper half of W's rows and W1 the lower;  y [M, out / 2].
void gemm_m64_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, void* stream);

}  // namespace fw::cuda
