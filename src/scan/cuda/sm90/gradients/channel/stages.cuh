// Channel decay: stages of a value block by bulk copies and TMA, and their products by wgmma.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/channel/products.cuh"
#include "scan/cuda/sm90/gradients/general/loads.cuh"

namespace fw::cuda {

// What is read without being copied ahead comes into the L2 cache, a tensor by a warpgroup, which looks for no other's
// rows. Not more than a work tile ahead: it would be gone again.
template <class Shape>
FW_DEVICE void prefetch_chunk(const ChannelChunk<Shape>& c, int work_tile) {
  if (!c.has(work_tile)) return;
  const Problem& p = c.args.problem;
  const auto prefetch = [&](int group, const auto& rows_of, int dim) {
    if (group % Shape::kGroups != c.group()) return;
    const Rows from = rows_of();
    const int row = (c.thread & 127) >> 1;
    if (from.data == nullptr || row >= c.rows(work_tile)) return;
    const int size = from.bf16 != 0 ? 2 : 4;
    const char* line = from.data + row * from.stride * size;
    FW_NO_UNROLL
    for (int at = (c.thread & 1) * 128; at < dim * size; at += 256) prefetch_line(line + at);
  };
  const auto tensor = [&](int group, const TokenArg& a, int dim) {
    prefetch(
        group, [&] { return c.rows_at(a, work_tile); }, dim);
  };
  if (c.thread == 0) bulk_prefetch(&c.args.pairs[c.tile_index(work_tile)], sizeof(IntraChunk));
  tensor(0, p.in.q, p.K);
  tensor(1, p.in.k, p.K);
  if (c.wants_values()) tensor(2, p.in.v, p.V);
  tensor(3, p.in.g, p.K);
  if (Shape::kGates) {
    tensor(0, p.in.erase_gate, p.rule.erase == Gate::kScalar ? 1 : p.K);
    tensor(1, p.in.write_gate, p.rule.write == Gate::kScalar ? 1 : p.V);
  }
  if (Shape::kMakesM) {
    prefetch(
        2, [&] { return c.rows_before(work_tile); }, p.K);
  } else if (Shape::kPrecond || !Shape::kStreams) {
    prefetch(
        2, [&] { return c.workspace_rows(WorkTile<Shape>::kM, p.H * p.K, work_tile); }, p.K);
  }
  if (!Shape::kStreams || Shape::kOwnKey) tensor(0, p.in.erase_key, p.K);
}

// As load_stage(), from the block's table of chunks.
template <class Shape>
FW_DEVICE void load_channel_stage(const ChannelChunk<Shape>& c, int stage, int work_tile, int block) {
  if (!c.has(work_tile)) return;
  const uint64_t first = static_cast<uint64_t>(c.tile_index(work_tile)) * static_cast<unsigned>(c.value_blocks());
  load_stage_tiles(c, stage, work_tile, block, static_cast<int64_t>(first + static_cast<unsigned>(block)));
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

}  // namespace fw::cuda
