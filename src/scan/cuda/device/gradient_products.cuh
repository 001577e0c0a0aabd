// The products of a chunk that contract over tokens or values: R, dR, dZ, dP, dT and what the states give dr, de, dw.
#pragma once

#include "scan/cuda/device/gradient_loads.cuh"

namespace fw::cuda {

// The warp's tiles of the products [64, kKey], as products with the states first: dO S0^T, dZ S0^T, R D^T.
struct StreamSums {
  float r[4][4] = {}, e[4][4] = {}, w[4][4] = {};
};

// The warp's tiles of the products [64, 64]: 16 rows x 8 kTiles columns from first_column() on.
template <class Shape>
struct PairSums {
  static constexpr int kTiles = 8 / Shape::kGroups;
  static constexpr int kColumns = 8 * kTiles;
  float p[kTiles][4] = {}, t[kTiles][4] = {};
};

template <class Shape>
FW_DEVICE int pair_column(const GradientChunk<Shape>& c) {
  return c.group() * PairSums<Shape>::kColumns;
}

// At column pair_column() + 8 j + 2 (lane % 4) and the next.
template <class Shape>
FW_DEVICE uint32_t& pair_fragment(const GradientChunk<Shape>& c, int tile, int half, int j) {
  return c.fragment_at(tile, half, PairSums<Shape>::kTiles * c.group(), j);
}

template <class Shape, int kTiles>
FW_DEVICE void store_tile(const GradientChunk<Shape>& c, int tile, const float (&x)[kTiles][4]) {
  FW_UNROLL
  for (int j = 0; j < kTiles; ++j) {
    pair_fragment(c, tile, 0, j) = pack_bf16(x[j][0], x[j][1]);
    pair_fragment(c, tile, 1, j) = pack_bf16(x[j][2], x[j][3]);
  }
}

// x += left right with left lower triangular [64, 64] or (kTransposed) the transpose of one, right [64, 64] of values.
template <bool kTransposed, class Shape, int kTiles>
FW_DEVICE void triangular_product(const GradientChunk<Shape>& c, float (&x)[kTiles][4], int left, int right) {
  const int block = c.block_row();
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (kTransposed ? k < block : k > block) continue;
    uint32_t a[4], b[4];
    if (kTransposed) {
      load_left_transposed(a, c.base + left, 16 * block, 16 * k, c.lane);
    } else {
      load_left(a, c.base + left, 16 * block, 16 * k, c.lane);
    }
    FW_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      load_right(b, c.base + right, 16 * k, pair_column(c) + 8 * j, c.lane);
      mma_bf16(x[j], a, b[0], b[1]);
      mma_bf16(x[j + 1], a, b[2], b[3]);
    }
  }
}

// Adds a stage's values to the products.
template <class Shape>
FW_DEVICE void add_products(const GradientChunk<Shape>& c, int stage, StreamSums& sums, PairSums<Shape>& pairs) {
  constexpr int kTiles = PairSums<Shape>::kTiles;
  const uint32_t at = c.base + stage;
  const int block = c.block_row();
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    uint32_t d_out[4], z[4], r[4], b[4];
    load_left(d_out, at + Shape::kOut, 16 * block, 16 * k, c.lane);
    load_left(r, at + Shape::kW, 16 * block, 16 * k, c.lane);
    if (Shape::kOnline) load_left(z, at + Shape::kV, 16 * block, 16 * k, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, at + Shape::kState, 16 * k, 32 * c.group() + 8 * j, c.lane);
      mma_bf16(sums.r[j], d_out, b[0], b[1]);
      mma_bf16(sums.r[j + 1], d_out, b[2], b[3]);
      if (Shape::kOnline) {
        mma_bf16(sums.e[j], z, b[0], b[1]);
        mma_bf16(sums.e[j + 1], z, b[2], b[3]);
      }
      load_right(b, at + Shape::kDState, 16 * k, 32 * c.group() + 8 * j, c.lane);
      mma_bf16(sums.w[j], r, b[0], b[1]);
      mma_bf16(sums.w[j + 1], r, b[2], b[3]);
    }
    FW_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      const int column = pair_column(c) + 8 * j;
      if (column > 16 * block) continue;
      load_right_transposed(b, at + Shape::kW, column, 16 * k, c.lane);
      mma_bf16(pairs.p[j], d_out, b[0], b[1]);
      mma_bf16(pairs.p[j + 1], d_out, b[2], b[3]);
      if (Shape::kOnline) {
        mma_bf16(pairs.t[j], z, b[0], b[1]);
        mma_bf16(pairs.t[j + 1], z, b[2], b[3]);
      }
    }
  }
}

// D (.) S0 of a stage, summed over a quarter of an eighth of its values: rows 8 i .. 8 i + 7 of two channels.
template <class Shape>
FW_DEVICE void add_state_dots(const GradientChunk<Shape>& c, int stage, float2& sum) {
  const int row = c.thread / Shape::kPairs * 8, channel = c.thread % Shape::kPairs * 2;
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t s = c.word(stage + Shape::kState, row + i, channel), d = c.word(stage + Shape::kDState, row + i, channel);
    sum.x += bf16_low(s) * bf16_low(d);
    sum.y += bf16_high(s) * bf16_high(d);
  }
}

}  // namespace fw::cuda
