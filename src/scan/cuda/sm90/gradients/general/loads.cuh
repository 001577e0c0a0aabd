// Scalar decay: what a chunk's gradients start from, on the way for later work tiles.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/row_loads.cuh"
#include "scan/cuda/sm90/gradients/common/general_layout.cuh"

namespace fw::cuda {

// What a stage's barrier waits for besides bytes: four chunk tiles and the rows of dO, which one thread or all load.
template <class Shape>
FW_DEVICE unsigned stage_arrivals(const WorkTile<Shape>& c) {
  return 4 + (Shape::kTma && c.all.tma ? 1 : Shape::kThreads);
}

// Tile number `chunk_tile` of each kind and the rows of dO, of a value block. TMA may load rows of the next sequence
// (clear_next_rows()).
template <class Shape>
FW_DEVICE void load_stage_tiles(const WorkTile<Shape>& c, int stage, int work_tile, int block, int64_t chunk_tile) {
  const GradientArgs& x = c.args;
  const int at_stage = stage * Shape::kStageBytes;
  uint64_t* barrier = c.barrier(stage);
  if (c.warp < 4 && c.lane == 0) {  // an chunk tile each
    const bool state = c.warp >= 2;
    const uint16_t* from = c.warp == 0 ? x.w : c.warp == 1 ? x.v : c.warp == 2 ? x.states : x.d_states;
    const int elements = state ? 64 * Shape::kTileK : kSw128Elements;
    const int64_t step = state ? Shape::kStateStep : kSw128Elements;
    const int to = c.warp == 0 ? Shape::kW : c.warp == 1 ? Shape::kV : c.warp == 2 ? Shape::kState : Shape::kDState;
    mbarrier_expect(barrier, 2 * elements);
    bulk_load(c.memory + at_stage + to, from + chunk_tile * step, 2 * elements, barrier);
  }
  if (Shape::kTma && c.all.tma) {
    if (c.thread != 4 * 32) return;
    mbarrier_expect(barrier, kTensorBytes);
    const int head = c.hv(work_tile), divisor = x.d_o.divisor;
    tensor_load(c.memory + at_stage + Shape::kOut, c.all.d_o, block * kValueBlock, divisor == 1 ? head : head / divisor,
                c.token(work_tile), c.batch(work_tile), barrier);
    return;
  }
  const bool copied = load_row_tile<kValueBlock>(c, c.rows_at(x.d_o, work_tile), c.pieces(kVec16DOut), work_tile,
                                                 block * kValueBlock, x.problem.V, at_stage + Shape::kOut);
  copied ? cp_async_arrive(barrier) : mbarrier_arrive(barrier);
}

// Of a stage that TMA loaded: rows after the last one of a packed sequence are the next one's; by all threads.
template <class Shape>
FW_DEVICE void clear_next_rows(const WorkTile<Shape>& c, int stage, int work_tile) {
  if constexpr (Shape::kTma) {
    const int rows = c.rows(work_tile);
    if (!c.all.tma || rows == kChunk || c.args.problem.sequences.offsets == nullptr) return;
    for (int item = c.thread; item < kChunk * 8; item += Shape::kThreads) {
      if (item / 8 >= rows)
        *reinterpret_cast<uint4*>(c.memory + stage + Shape::kOut + 16 * item) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
    sync_threads();
  }
}

template <class Shape>
FW_DEVICE void load_stage(const WorkTile<Shape>& c, int stage, int work_tile, int block) {
  if (c.has(work_tile)) load_stage_tiles(c, stage, work_tile, block, c.tile(work_tile) * c.blocks + block);
}

// A and P, by one thread.
template <class Shape>
FW_DEVICE void load_pairs(const WorkTile<Shape>& c, int work_tile) {
  if (!c.has(work_tile)) return;
  const IntraChunk& from = c.args.pairs[c.tile(work_tile)];
  const bool p = !c.args.v_is_dz;
  mbarrier_expect(c.pairs_barrier(), ((Shape::kDelta ? 1 : 0) + (p ? 1 : 0)) * kSw128Bytes);
  if (Shape::kDelta) bulk_load(c.memory + Shape::kA, from.a, kSw128Bytes, c.pairs_barrier());
  if (p) bulk_load(c.memory + Shape::kP, from.p, kSw128Bytes, c.pairs_barrier());
}

// q and k.
template <class Shape>
FW_DEVICE void load_keys(const WorkTile<Shape>& c, int work_tile) {
  if (!c.has(work_tile)) return;
  const Problem& x = c.args.problem;
  const int to = Shape::kRaw + c.key_offset(work_tile);
  const Rows q = c.rows_at(x.in.q, work_tile), k = c.rows_at(x.in.k, work_tile);
  bool copied =
      load_row_tile<Shape::kTileK>(c, q, Shape::kStreams || (wide_rows(q) && x.K % 8 == 0), work_tile, 0, x.K, to);
  copied = load_row_tile<Shape::kTileK>(c, k, Shape::kStreams || (wide_rows(k) && x.K % 8 == 0), work_tile, 0, x.K,
                                        to + Shape::kStateBytes) &&
           copied;
  if (copied) {
    cp_async_arrive(c.key_barrier(work_tile));
  } else {
    cp_async_commit();
    cp_async_wait<0>();
    mbarrier_arrive(c.key_barrier(work_tile));
  }
}

// What is read without being copied ahead comes into the L2 cache; by the warps from kPrefetchWarp on.
inline constexpr int kPrefetchWarp = 7;
template <class Shape>
FW_DEVICE void prefetch_row_lines(const WorkTile<Shape>& c, const Rows& from, int work_tile, int dim) {
  if (from.data == nullptr) return;
  const int size = from.bf16 != 0 ? 2 : 4, lines = (dim * size + 127) / 128, count = c.rows(work_tile) * lines;
  for (int item = c.thread - 32 * kPrefetchWarp; item < count; item += Shape::kThreads - 32 * kPrefetchWarp) {
    const int row = item / lines;
    prefetch_line(from.data + row * from.stride * size + (item - row * lines) * 128);
  }
}
template <class Shape>
FW_DEVICE void prefetch_work_tile(const WorkTile<Shape>& c, int work_tile) {
  if (c.warp < kPrefetchWarp || !c.has(work_tile)) return;
  const Problem& p = c.args.problem;
  if (c.thread == 32 * kPrefetchWarp) bulk_prefetch(&c.args.pairs[c.tile(work_tile)], sizeof(IntraChunk));
  prefetch_row_lines(c, c.rows_at(p.in.v, work_tile), work_tile, p.V);
  prefetch_row_lines(c, c.rows_at(p.in.q, work_tile), work_tile, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.k, work_tile), work_tile, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.erase_key, work_tile), work_tile, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.erase_gate, work_tile), work_tile, p.rule.erase == Gate::kScalar ? 1 : p.K);
  prefetch_row_lines(c, c.rows_at(p.in.write_gate, work_tile), work_tile, p.rule.write == Gate::kScalar ? 1 : p.V);
  prefetch_row_lines(c, c.workspace_rows(WorkTile<Shape>::kM, p.H * p.K, work_tile), work_tile, p.K);
}

}  // namespace fw::cuda
