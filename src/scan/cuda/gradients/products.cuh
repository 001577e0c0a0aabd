// The products of a chunk that contract over tokens or values: R, dR, dZ, dP, dT and what the states give dr, de, dw.
#pragma once

#include "scan/cuda/gradients/loads.cuh"

namespace fw::cuda {

// The warp's tiles of the products [64, kTileK], as products with the states first: dO S0^T, dZ S0^T, R D^T.
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

// D (.) S0 of a stage, summed over a quarter of an eighth of its values: rows 8 i .. 8 i + 7 of two channels.
template <class Shape>
FW_DEVICE void add_state_dots(const GradientChunk<Shape>& c, int stage, float2& sum) {
  const int row = c.thread / Shape::kPairs * 8, channel = c.thread % Shape::kPairs * 2;
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t s = c.word(stage + Shape::kState, row + i, channel),
                   d = c.word(stage + Shape::kDState, row + i, channel);
    sum.x += bf16_low(s) * bf16_low(d);
    sum.y += bf16_high(s) * bf16_high(d);
  }
}

}  // namespace fw::cuda
