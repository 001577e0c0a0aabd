// Scalar decay: what a chunk's gradients start from, on the way for later work tiles.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/sm90/gradients/common/general_layout.cuh"
#include "scan/cuda/sm90/gradients/common/products.cuh"

namespace fw::cuda {

FW_DEVICE bool wide_rows(const Rows& x) {
  return x.bf16 != 0 && x.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0;
}

// 64 rows x kColumns columns from `column` on into a tile. What can be copied as it is comes without waiting:
// returns whether.
template <int kColumns, class Shape>
FW_DEVICE bool load_row_tile(const WorkTile<Shape>& c, const Rows& from, bool wide, int work_tile, int column,
                             int limit, int to) {
  constexpr int kAtoms = kColumns / 8;
  const int rows = c.rows(work_tile);
  FW_UNROLL
  for (int item = c.thread; item < 64 * kAtoms; item += Shape::kThreads) {
    const int row = item / kAtoms, in_tile = item % kAtoms * 8;
    const bool valid = from.data != nullptr && row < rows && column + in_tile < limit;
    if (wide) {
      cp_async_16(c.base + to + sw128_offset(row, in_tile),
                  valid ? from.data + 2 * (row * from.stride + column + in_tile) : from.data, valid);
      continue;
    }
    float x[8] = {};
    if (valid) load_channels(from, row, column + in_tile, limit, x);
    *reinterpret_cast<uint4*>(c.memory + to + sw128_offset(row, in_tile)) = pack_8(x);
  }
  return wide;
}

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

// The row scales that a thread loads ahead: warps 2 and 3 beta of a row, warp 4 two log-decays.
template <class Shape>
FW_DEVICE float2 load_row_scales(const WorkTile<Shape>& c, int work_tile) {
  float2 x = make_float2(1, 0);
  if (c.warp < 2 || c.warp > 4 || !c.has(work_tile)) return x;
  const Problem& p = c.args.problem;
  const int rows = c.rows(work_tile);
  if (c.warp < 4) {
    if (p.rule.uses_beta() && c.thread - 64 < rows)
      x.x = load_element(c.rows_at(p.in.beta, work_tile), c.thread - 64, 0);
    return x;
  }
  const int row = 2 * c.lane;
  x.x = 0;
  if (p.rule.decay == Decay::kScalar) {
    const Rows g = c.rows_at(p.in.g, work_tile);
    if (row < rows) x.x = load_element(g, row, 0);
    if (row + 1 < rows) x.y = load_element(g, row + 1, 0);
  } else if (p.rule.decay == Decay::kConstant) {
    const float g = log1pf(-exp2f(-5.0f - static_cast<float>(c.hv(work_tile))));
    x = make_float2(row < rows ? g : 0.0f, row + 1 < rows ? g : 0.0f);
  }
  return x;
}

// By a warp: G of all rows, in units of log 2; rows past the end keep the last one's.
template <class Shape>
FW_DEVICE void sum_decay(const WorkTile<Shape>& c, int work_tile, float2 g) {
  const float first = log2_decay(g.x), second = log2_decay(g.y);
  float sum = first + second;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  *reinterpret_cast<float2*>(c.work_tile_floats(Shape::kG, work_tile) + 2 * c.lane) = make_float2(sum - second, sum);
}

template <class Shape>
FW_DEVICE void publish_row_scales(const WorkTile<Shape>& c, int work_tile, float2 numbers) {
  if (c.warp == 2 || c.warp == 3) c.work_tile_floats(Shape::kBeta, work_tile)[c.thread - 64] = numbers.x;
  if constexpr (!Shape::kChannel) {
    if (c.warp == 4) sum_decay(c, work_tile, numbers);
  }
}

}  // namespace fw::cuda
