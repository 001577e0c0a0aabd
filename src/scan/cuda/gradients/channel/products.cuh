// Channel decay: the products of a stage. Of two products with the same operand on the right, or none in common, half
// of the warpgroups make one each, with twice the columns. A warpgroup reads all of its left operand however few
// columns it makes, and shared memory is what the products wait for.
#pragma once

#include "scan/cuda/gradients/channel/chunk.cuh"
#include "scan/cuda/gradients/tile_products.cuh"

namespace fw::cuda {

// Where warpgroups make products and there are registers for it; else make_value_tiles() and both products by all.
template <class Shape>
inline constexpr bool kSplitsPairs = Shape::kDelta&& Shape::kTileK == 128 && !Shape::kMmaSync;

// A warp's tiles of dP and -dT, or of one of them: dP by the first half of the warpgroups, -dT by the second.
template <class Shape>
struct ChannelPairs {
  static constexpr int kProducts = Shape::kDelta && !kSplitsPairs<Shape> ? 2 : 1;
  static constexpr int kGroups = kSplitsPairs<Shape> ? Shape::kGroups / 2 : Shape::kGroups;  // that share one
  static constexpr int kTiles = 8 / kGroups, kColumns = 8 * kTiles;
  float x[kProducts][kTiles][4] = {};
};
// Whether product `i` of the warp's is dP.
template <class Shape>
FW_DEVICE bool makes_p(const ChannelChunk<Shape>& c, int i) {
  return i == 0 && c.group() < ChannelPairs<Shape>::kGroups;
}
// The first column of the warp's tiles.
template <class Shape>
FW_DEVICE int half_column(const ChannelChunk<Shape>& c) {
  return c.group() % ChannelPairs<Shape>::kGroups * ChannelPairs<Shape>::kColumns;
}

// Adds a stage's values to the products; until finish_channel_products() nothing touches them. meanwhile(): work in
// their midst, since a warp waits where it starts a product after those of all other warps.
template <class Shape, class Meanwhile>
FW_DEVICE void start_channel_products(const ChannelChunk<Shape>& c, int stage, StreamSums& sums,
                                      ChannelPairs<Shape>& pairs, const Meanwhile& meanwhile) {
  const uint32_t at = c.base + stage, states = at + key_columns(c);
  wgmma_fence();
  start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.r), at + Shape::kOut, states + Shape::kState);
  if (Shape::kDelta)
    start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.e), at + Shape::kV, states + Shape::kState);
  meanwhile();
  start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.w), at + Shape::kW, states + Shape::kDState);
  FW_UNROLL
  for (int i = 0; i < ChannelPairs<Shape>::kProducts; ++i) {
    start_product<ChannelPairs<Shape>::kColumns, false, false, false, kProductForm<Shape>>(
        flat(pairs.x[i]), at + (makes_p(c, i) ? Shape::kOut : Shape::kV), at + Shape::kW + 128 * half_column(c));
  }
  wgmma_commit();
}
template <class Shape>
FW_DEVICE void finish_channel_products(StreamSums& sums, ChannelPairs<Shape>& pairs) {
  wgmma_wait<0>();
  keep(flat(sums.r)), keep(flat(sums.w));
  if (Shape::kDelta) keep(flat(sums.e));
  FW_UNROLL
  for (int i = 0; i < ChannelPairs<Shape>::kProducts; ++i) keep(flat(pairs.x[i]));
}

// dP and -dT strictly below the diagonal in bf16 in place of P and A; dP's diagonal apart.
template <class Shape>
FW_DEVICE void store_block_pairs(const ChannelChunk<Shape>& c, const ChannelPairs<Shape>& pairs) {
  FW_UNROLL
  for (int j = 0; j < ChannelPairs<Shape>::kTiles; ++j) {
    const int column = half_column(c) + 8 * j + 2 * (c.lane & 3);
    if (column / 16 > c.block_row()) continue;
    FW_UNROLL
    for (int i = 0; i < ChannelPairs<Shape>::kProducts; ++i) {
      const bool p = makes_p(c, i);
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = c.row() + 8 * half;
        const float* x = pairs.x[i][j] + 2 * half;
        c.fragment_at(p ? Shape::kP : Shape::kA, half, half_column(c) / 8, j) =
            pack_bf16(row > column ? x[0] : 0.0f, row > column + 1 ? x[1] : 0.0f);
        if (p && row == column) c.floats(Shape::kDiagonal)[row] = x[0];
        if (p && row == column + 1) c.floats(Shape::kDiagonal)[row] = x[1];
      }
    }
  }
}

}  // namespace fw::cuda
