// A tensor of tokens in device memory, as kernels are given it, and what its memory allows. Plain C++ without CUDA.
#pragma once

#include <cstdint>

namespace fw::cuda {

// A tensor of tokens [B, T, heads, dim] or [B, T, heads]. The element of batch b, token t (packed: b = 0, t over all
// sequences), value head hv is at b stride_b + t stride_t + (hv / divisor) stride_h. Strides count elements, the
// channels of a row are contiguous. data null: absent.
struct TokenArg {
  void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  int32_t bf16 = 0;     // else float32
  int32_t divisor = 1;  // value heads that share one head of the tensor
};

// Rows at multiples of 16 bytes.
bool aligned_rows(const TokenArg& a);
// bf16 rows of `dim` channels in 16-byte vectors, wherever a sequence or head begins.
bool is_vec16(const TokenArg& a, int dim);
// Rows of pairs of neighbouring channels that are one aligned access.
bool is_vec2(const TokenArg& a, int dim);
// What TMA loads (tensor_map.h): bf16 in 16-byte vectors, strides that it can express.
bool tma_compatible(const TokenArg& a, int64_t B, int64_t T, int64_t heads, int64_t dim);

}  // namespace fw::cuda
