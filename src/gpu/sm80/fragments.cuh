// Fragments of products of 64 rows in the registers of four warps, 16 rows a warp, as mma.sync and wgmma have them.
// Thread t of a warp holds element (t / 4 + 8 h, 8 j + 2 (t % 4) + e) as d[4 j + 2 h + e] (sm90/wgmma.cuh).
#pragma once

#include "gpu/sm80/stores.cuh"
#include "gpu/sw128.h"

namespace fw::cuda {

FW_DEVICE int warp_in_group() { return static_cast<int>(warp_index()) & 3; }

// Byte of a SW128 tile [64 tokens, 64 values] that this lane names to ldmatrix or stmatrix (transposed) for the
// fragment of the first 16 tokens of its warp's 16 values; 16 tokens further are 2048 bytes.
FW_DEVICE int token_fragment_offset() {
  const int matrix = static_cast<int>(lane_index()) / 8, r = static_cast<int>(lane_index()) % 8;
  return ((matrix / 2) * 8 + r) * 128 + (((2 * warp_in_group() + matrix % 2) ^ r) * 16);
}

FW_DEVICE void load_token_fragment(uint32_t (&r)[4], uint32_t sw128, int k) {
  ldmatrix_x4_trans(r, sw128 + static_cast<uint32_t>(token_fragment_offset() + k * 2048));
}

FW_DEVICE void store_token_fragment(uint32_t sw128, int k, const uint32_t (&r)[4]) {
  store_matrices<true>(sw128 + static_cast<uint32_t>(token_fragment_offset() + k * 2048), r);
}

// What this lane names to stmatrix of SW128 tiles of 64 rows (of a state values, of O tokens) for the fragment of its
// warp's 16 rows and columns 16 k to 16 k + 15.
FW_DEVICE uint32_t state_fragment(uint32_t sw128_tiles, int k) {
  const int matrix = static_cast<int>(lane_index()) / 8,
            row = 16 * warp_in_group() + (matrix % 2) * 8 + static_cast<int>(lane_index()) % 8;
  const int piece = (2 * (k % 4) + matrix / 2) ^ (row & 7);
  return sw128_tiles + static_cast<uint32_t>(k / 4 * kSw128Bytes + row * 128 + piece * 16);
}
FW_DEVICE void store_state_fragment(uint32_t sw128_tiles, int k, const uint32_t (&r)[4]) {
  store_matrices<false>(state_fragment(sw128_tiles, k), r);
}

// From lane l having words j = 0 .. 3 for columns 8 j + 2 l and the next, to columns 8 l .. 8 l + 7.
FW_DEVICE void transpose_quad(uint32_t (&w)[4], int lane) {
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  const uint32_t a = shuffle_xor(odd ? w[0] : w[1], 1), b = shuffle_xor(odd ? w[2] : w[3], 1);
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a, x2 = odd ? b : w[2], x3 = odd ? w[3] : b;
  const uint32_t c = shuffle_xor(high ? x0 : x2, 2), d = shuffle_xor(high ? x1 : x3, 2);
  w[0] = high ? c : x0, w[1] = high ? d : x1, w[2] = high ? x2 : c, w[3] = high ? x3 : d;
}

// The fragments of all columns of such rows, as SW128 tiles in memory: 16 bytes a lane.
template <int kSteps>
FW_DEVICE void store_state_words(uint16_t* sw128_tiles, const uint32_t (&a)[kSteps][4]) {
  const int lane = static_cast<int>(lane_index()), of = lane % 4, row = 16 * warp_in_group() + of % 2 * 8 + lane / 4;
  char* const to = reinterpret_cast<char*>(sw128_tiles) + row * 128;
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    uint32_t w[4] = {a[k][0], a[k][1], a[k][2], a[k][3]};
    transpose_quad(w, lane);
    *reinterpret_cast<uint4*>(to + k / 4 * kSw128Bytes + ((2 * (k % 4) + of / 2) ^ (row & 7)) * 16) =
        make_uint4(w[0], w[1], w[2], w[3]);
  }
}

template <int kN>
FW_DEVICE void pack_fragments(const float (&d)[kN], uint32_t (&a)[kN / 8][4]) {
  FW_UNROLL
  for (int k = 0; k < kN / 8; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
  }
}

// What that leaves out.
template <int kN>
FW_DEVICE void pack_lo_parts(const float (&d)[kN], const uint32_t (&a)[kN / 8][4], uint32_t (&lo_parts)[kN / 8][4]) {
  FW_UNROLL
  for (int k = 0; k < kN / 8; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) lo_parts[k][i] = pack_lo(a[k][i], d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
  }
}

// Column j of the accumulators times scale[j].
template <int kN>
FW_DEVICE void scale_columns(float (&d)[kN], const float* scale) {
  const float* mine = scale + 2 * (lane_index() % 4);
  FW_UNROLL
  for (int j = 0; j < kN / 4; ++j) {
    const float2 s = *reinterpret_cast<const float2*>(mine + 8 * j);
    d[4 * j] *= s.x;
    d[4 * j + 1] *= s.y;
    d[4 * j + 2] *= s.x;
    d[4 * j + 3] *= s.y;
  }
}

// y += fragments of token columns times a scalar per token.
FW_DEVICE void add_fragments(float (&y)[32], const uint32_t (&x)[4][4], const float* numbers) {
  const float* mine = numbers + 2 * (lane_index() % 4);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(mine + 16 * k + 8 * (i / 2));
      y[8 * k + 2 * i] += f.x * bf16_low(x[k][i]), y[8 * k + 2 * i + 1] += f.y * bf16_high(x[k][i]);
    }
  }
}
// The same rounded, without y.
FW_DEVICE void scale_fragments(const uint32_t (&x)[4][4], const float* numbers, uint32_t (&y)[4][4]) {
  float sum[32] = {};
  add_fragments(sum, x, numbers);
  pack_fragments(sum, y);
}

}  // namespace fw::cuda
