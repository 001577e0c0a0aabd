// Tensors of tokens as TMA sees them. It loads 64 tokens by 64 channels of one head into shared memory as a SW128 tile
// (sw128.h), with zeros for what lies outside of the tensor. That costs one instruction (gpu/sm90/ptx.cuh:
// tensor_load).
#pragma once

#include "gpu/tensor_arg.h"

namespace fw::cuda {

struct alignas(128) TensorMap {
  unsigned char bytes[128];
};
inline constexpr uint32_t kTensorBytes = 8192;  // of a SW128 tile that tensor_load loads, of 64 rows

// Of a [B, T, heads, dim] (packed: B = 1, T all tokens). False, and `map` is nothing, where TMA cannot take it: it
// wants bf16 in vectors of 16 bytes, and a driver that makes maps. rows: tokens of a SW128 tile, a multiple of 8, at
// most 256.
bool make_tensor_map(const TokenArg& a, int64_t B, int64_t T, int64_t heads, int64_t dim, TensorMap& map,
                     int rows = 64);

}  // namespace fw::cuda
