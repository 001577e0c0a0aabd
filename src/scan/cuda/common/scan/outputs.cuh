// How O of a chunk leaves the forward scans.
#pragma once

#include "scan/cuda/common/scan/parts.cuh"

namespace fw::cuda {

// Accumulators O^T of a chunk, its tokens from number `first` on, straight to float32 rows.
template <int kN>
FW_DEVICE void store_float_rows(const TileRows& t, int c, const float (&o)[kN], int first = 0) {
  const int token = c * kChunk + first + 2 * (static_cast<int>(lane_index()) % 4),
            column = t.column + 16 * warp_in_group() + static_cast<int>(lane_index()) / 4;
  float* to = reinterpret_cast<float*>(t.rows.data);
  FW_UNROLL
  for (int i = 0; i < kN; ++i) {
    const int row = token + i / 4 * 8 + i % 2, v = column + i % 4 / 2 * 8;
    if (row < t.length && v < t.V) to[row * t.rows.stride + v] = o[i];
  }
}

// By kThreads threads, of which this is number i: a SW128 tile of bf16 to bf16 rows.
template <int kThreads = 64>
FW_DEVICE void store_bf16_rows(const TileRows& t, int c, const char* sw128, int i) {
  constexpr int kStep = kThreads / 8;
  const int piece = i % 8, row = i / 8;
  const int column = t.column + piece * 8;
  const char* from = sw128 + row * 128 + (((piece ^ row) & 7) * 16);
  uint16_t* to =
      reinterpret_cast<uint16_t*>(t.rows.data) + static_cast<int64_t>(c * kChunk + row) * t.rows.stride + column;
  FW_UNROLL
  for (int j = 0; j < kChunk / kStep; ++j) {
    if (c * kChunk + row + j * kStep >= t.length) break;
    const uint4 x = *reinterpret_cast<const uint4*>(from + j * kStep * 128);
    uint16_t* at = to + j * kStep * t.rows.stride;
    if (t.wide) {
      if (column < t.V) *reinterpret_cast<uint4*>(at) = x;
    } else {
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      FW_UNROLL
      for (int e = 0; e < 8; ++e) {
        if (column + e < t.V) at[e] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

}  // namespace fw::cuda
