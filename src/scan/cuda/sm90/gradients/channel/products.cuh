// Channel decay: the products of a stage. Of two products with the same operand on the right, or none in common, half
// of the warpgroups make one each, with twice the columns. A warpgroup reads all of its left operand however few
// columns it makes, and shared memory is what the products wait for.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/tile_products.cuh"
#include "scan/cuda/sm90/gradients/channel/layout.cuh"
#include "scan/cuda/sm90/gradients/general/loads.cuh"

namespace fw::cuda {

// As load_stage(), from the block's table of chunks.
template <class Shape>
FW_DEVICE void load_channel_stage(const ChannelChunk<Shape>& c, int stage, int work_tile, int block) {
  if (!c.has(work_tile)) return;
  const uint64_t first = static_cast<uint64_t>(c.tile_index(work_tile)) * static_cast<unsigned>(c.value_blocks());
  load_stage_tiles(c, stage, work_tile, block, static_cast<int64_t>(first + static_cast<unsigned>(block)));
}

// Where there are registers for it; else make_value_tiles() and both products by all.
template <class Shape>
inline constexpr bool kSplitsPairs = Shape::kDelta&& Shape::kTileK == 128;

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

// As make_value_tiles(): dR and then dZ, unless that is there, by the first half of the warpgroups, R by the second.
// After it a fence and a barrier are wanted.
template <class Shape>
FW_DEVICE void make_tiles_split_pairs(const ChannelChunk<Shape>& c, int stage) {
  constexpr int kTiles = ChannelPairs<Shape>::kTiles, kColumns = ChannelPairs<Shape>::kColumns;
  const int atom = half_column(c) / 8;
  const uint32_t columns = c.base + 2 * half_column(c);
  const auto store = [&](int tile, const float(&x)[kTiles][4]) {
    FW_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      c.fragment_at(tile, 0, atom, j) = pack_bf16(x[j][0], x[j][1]);
      c.fragment_at(tile, 1, atom, j) = pack_bf16(x[j][2], x[j][3]);
    }
  };
  const auto finish = [](float(&x)[kTiles][4]) {
    wgmma_commit();
    wgmma_wait<0>();
    keep(flat(x));
  };
  float d[kTiles][4];
  fence_async_shared();  // what was copied and written for this
  if (makes_p(c, 0)) {
    // as often as the others, else racecheck loses count
    if (c.args.v_is_dz) return named_barrier_sync(1 + c.group(), 128);
    FW_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      const uint32_t low = c.fragment_at(stage + Shape::kV, 0, atom, j),
                     high = c.fragment_at(stage + Shape::kV, 1, atom, j);
      d[j][0] = bf16_low(low), d[j][1] = bf16_high(low), d[j][2] = bf16_low(high), d[j][3] = bf16_high(high);
    }
    keep(flat(d));
    wgmma_fence();
    start_product<kColumns, true, true, false, ProductForm::kSplitDescriptor>(flat(d), c.base + Shape::kP,
                                                                              columns + stage + Shape::kOut);
    finish(d);
    store(Shape::kDR, d);
    fence_async_shared();
    named_barrier_sync(1 + c.group(), 128);  // all rows of the group's columns are there
    wgmma_fence();
    start_product<kColumns, true, true, true, ProductForm::kSplitDescriptor>(flat(d), c.base + Shape::kA,
                                                                             columns + Shape::kDR);
    finish(d);
    store(stage + Shape::kV, d);
  } else {
    wgmma_fence();
    start_product<kColumns, false, true, true, ProductForm::kSplitDescriptor>(flat(d), c.base + Shape::kA,
                                                                              columns + stage + Shape::kW);
    finish(d);
    named_barrier_sync(1 + c.group(), 128);  // W has been read
    store(stage + Shape::kW, d);
  }
}

// Adds a stage's values to the products; until finish_channel_products() nothing touches them. meanwhile(): work in
// their midst, since a warp waits where it starts a product after those of all other warps.
template <class Shape, class Meanwhile>
FW_DEVICE void start_channel_products(const ChannelChunk<Shape>& c, int stage, StreamSums& sums,
                                      ChannelPairs<Shape>& pairs, const Meanwhile& meanwhile) {
  const uint32_t at = c.base + stage, states = at + key_columns(c);
  wgmma_fence();
  start_product<32, false, true, false, ProductForm::kSplitDescriptor>(flat(sums.r), at + Shape::kOut,
                                                                       states + Shape::kState);
  if (Shape::kDelta)
    start_product<32, false, true, false, ProductForm::kSplitDescriptor>(flat(sums.e), at + Shape::kV,
                                                                         states + Shape::kState);
  meanwhile();
  start_product<32, false, true, false, ProductForm::kSplitDescriptor>(flat(sums.w), at + Shape::kW,
                                                                       states + Shape::kDState);
  FW_UNROLL
  for (int i = 0; i < ChannelPairs<Shape>::kProducts; ++i) {
    start_product<ChannelPairs<Shape>::kColumns, false, false, false, ProductForm::kSplitDescriptor>(
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
