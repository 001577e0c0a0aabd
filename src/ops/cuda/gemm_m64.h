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

// Of more than 32 rows: rows of the weight of a block (32, 48, 64, 80, 96 or 128; with slices at most 64), and in how
// many slices its columns are (1, 2 or 4; with SwiGLU 1). By the weight's shape [out, in] alone: the slices are part of
// the bits.
struct GemmM64Tiles {
  int rows = 32, slices = 1;
};
GemmM64Tiles gemm_m64_tiles(int64_t out, int64_t in, bool swiglu = false);

// Of both: x [M, in], W [out, in], M at most kGemmM64MaxM. Columns are contiguous, strides free but for what
// takes_gemm_m64() asks for. Sums are float32, rounded once. A row's bits do not depend on the rows alongside it. Nor
// do they on how many there are, up to 32 (gemm_m32.h has their kernel) and above. The weight and the bias are read
// before the kernel in front is over. Given tiles are of the kernel for more than 32 rows, which then takes any number.
//
// y = x W^T + bias + addend;  y [M, out]; bias [out] or null; addend [M, out], y itself or apart from it, or null.
void gemm_m64_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     void* stream);
void gemm_m64_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     GemmM64Tiles tiles, void* stream);
// The same of two products of one width, without addends, in one kernel; false, and nothing is done, where
// takes_gemm_m64() says no of one or its columns are in slices.
bool gemm_m64_pair(const LinearPart<Bf16>& first, const LinearPart<Bf16>& second, void* stream);
// y = silu(x W0^T) (x W1^T), W0 the upper half of W's rows and W1 the lower;  y [M, out / 2].
void gemm_m64_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, void* stream);
void gemm_m64_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, GemmM64Tiles tiles, void* stream);

}  // namespace fw::cuda
