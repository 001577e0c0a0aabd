// What the products of 9 to 32 and of 33 to 64 rows have in common (gemm_m32.cu, gemm_m64.cu).
#pragma once

#include "base/error.h"
#include "gpu/launch.h"
#include "gpu/tensor_map.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/packets.cuh"

namespace fw::cuda {

struct GemmRowsArgs {
  const float* bias = nullptr;   // [out]
  const Bf16* addend = nullptr;  // [rows, out]
  Bf16* y = nullptr;             // [rows, out]
  int64_t addend_stride = 0, y_stride = 0;
  int out = 0, rows = 0, stages = 0;      // of the whole product; with kSwiglu out is half of W's rows
  int32_t addend_whole = 0, y_whole = 0;  // four numbers from a multiple of four on are one access
};
struct GemmRowsMaps {
  TensorMap weight, x;
};

// Four numbers, of which `left` are there.
FW_DEVICE Packet<Bf16, 4> load_four(const Bf16* from, int left, bool whole) {
  Packet<Bf16, 4> packet;
  if (whole && left >= 4) {
    packet.load(from);
  } else {
    float x[4];
    FW_UNROLL for (int i = 0; i < 4; ++i) x[i] = i < left ? number(from[i]) : 0.0f;
    packet.set(x);
  }
  return packet;
}
FW_DEVICE void store_four(Bf16* to, int left, bool whole, const float (&x)[4]) {
  if (whole && left >= 4) {
    Packet<Bf16, 4> packet;
    packet.set(x);
    packet.store(to);
  } else {
    FW_UNROLL for (int i = 0; i < 4; ++i) {
      if (i < left) to[i] = stored<Bf16>(x[i]);
    }
  }
}

inline bool map_of(Mat<const Bf16> m, int rows, TensorMap& map) {
  const TokenArg tensor{const_cast<Bf16*>(m.data), 0, m.stride, 0, 1, 1};
  return make_tensor_map(tensor, 1, m.rows, 1, m.cols, map, rows);
}
inline bool in_fours(const Bf16* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % 4 == 0;
}

// In a what follows from x [M, in] and y, whose product goes by stages of `columns` columns.
inline void set_rows(GemmRowsArgs& a, Mat<const Bf16> x, Mat<Bf16> y, int columns) {
  a.y = y.data, a.y_stride = y.stride, a.y_whole = in_fours(y.data, y.stride);
  a.rows = static_cast<int>(x.rows);
  a.stages = static_cast<int>(parts_of(x.cols, columns));
}
// Of y [M, out] = x W^T + bias + addend, where they are given.
inline GemmRowsArgs linear_args(int64_t out, const float* bias, Mat<const Bf16> addend) {
  GemmRowsArgs a;
  a.bias = bias;
  a.addend = addend.data, a.addend_stride = addend.stride, a.addend_whole = in_fours(addend.data, addend.stride);
  a.out = static_cast<int>(out);
  return a;
}

}  // namespace fw::cuda
