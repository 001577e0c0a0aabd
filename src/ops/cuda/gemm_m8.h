// y = x W^T of few rows on the device: what a decoded token asks of a weight. Bound by the reading of the weight, which
// no library's product for whole tiles reaches with one row.
#pragma once

#include <cstdint>

#include "base/mat.h"
#include "ops/ops.h"

namespace fw::cuda {

// The most rows that gemm_m8_linear takes; beyond, tensor cores pay.
inline constexpr int64_t kGemmM8MaxM = 8;

// y = x W^T + bias (+ y where kAccumulate), sums in float32, rounded once;  x [M, in], W [out, in], y [M, out], M at
// most kGemmM8MaxM; bias [out] or null. Columns are contiguous, strides free. A row's bits do not depend on the rows
// alongside it. T is float or Bf16.
template <class T>
void gemm_m8_linear(Mat<const T> x, Mat<const T> weight, const float* bias, Mat<T> y, Write write, void* stream);

// The same of rows sorted by expert: W [E out, in] has a weight [out, in] of each. A weight is read once for every
// kGemmM8MaxM rows of its expert, so this is for a few rows of each. `rows` is read before the kernel in front is over,
// as the weight is.
inline bool takes_gemm_m8_experts(const ExpertRows& rows, int64_t count) {
  return count <= 65535 && (count <= 64 * rows.chosen || count <= 4 * rows.experts);
}
template <class T>
void gemm_m8_experts(Mat<const T> x, const ExpertRows& rows, Mat<const T> weight, Mat<T> y, void* stream);

}  // namespace fw::cuda
