// Scalar decay: what a chunk's gradients start from, on the way for later turns.
#pragma once

#include "scan/cuda/gradients/common/products.cuh"
#include "scan/cuda/gradients/general/layout.cuh"

namespace fw::cuda {

FW_DEVICE bool wide_rows(const Rows& x) { return x.bf16 != 0 && x.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0; }

// 64 rows x kColumns columns from `column` on into a tile. What can be copied as it is comes without waiting:
// returns whether.
template <int kColumns, class Shape>
FW_DEVICE bool load_row_tile(const TurnChunk<Shape>& c, const Rows& from, bool wide, int turn, int column, int limit, int to) {
  constexpr int kGranules = kColumns / 8;
  const int rows = c.rows(turn);
  FW_UNROLL
  for (int item = c.thread; item < 64 * kGranules; item += Shape::kThreads) {
    const int row = item / kGranules, in_tile = item % kGranules * 8;
    const bool valid = from.data != nullptr && row < rows && column + in_tile < limit;
    if (wide) {
      cp_async_16(c.base + to + panel_offset(row, in_tile), valid ? from.data + 2 * (row * from.stride + column + in_tile) : from.data, valid);
      continue;
    }
    float x[8] = {};
    if (valid) load_channels(from, row, column + in_tile, limit, x);
    *reinterpret_cast<uint4*>(c.memory + to + panel_offset(row, in_tile)) = pack_8(x);
  }
  return wide;
}

// What a stage's barrier waits for besides bytes: four images and the rows of dO, which one thread or all bring.
template <class Shape>
FW_DEVICE unsigned stage_arrivals(const TurnChunk<Shape>& c) {
  return 4 + (Shape::kEngine && c.all.engine ? 1 : Shape::kThreads);
}

// Image number `image` of each kind and the rows of dO, of a value block. The copy engine may bring rows of the next sequence (clear_next_rows()).
template <class Shape>
FW_DEVICE void load_stage_images(const TurnChunk<Shape>& c, int stage, int turn, int block, int64_t image) {
  const GradientArgs& x = c.args;
  const int at_stage = stage * Shape::kStageBytes;
  uint64_t* barrier = c.barrier(stage);
  if (c.warp < 4 && c.lane == 0) {  // an image each
    const bool state = c.warp >= 2;
    const uint16_t* from = c.warp == 0 ? x.w : c.warp == 1 ? x.v : c.warp == 2 ? x.states : x.d_states;
    const int elements = state ? 64 * Shape::kKey : kPanel;
    const int64_t step = state ? Shape::kStateStep : kPanel;
    const int to = c.warp == 0 ? Shape::kW : c.warp == 1 ? Shape::kV : c.warp == 2 ? Shape::kState : Shape::kDState;
    mbarrier_expect(barrier, 2 * elements);
    bulk_load(c.memory + at_stage + to, from + image * step, 2 * elements, barrier);
  }
  if (Shape::kEngine && c.all.engine) {
    if (c.thread != 4 * 32) return;
    mbarrier_expect(barrier, kTensorBytes);
    const int head = c.hv(turn), divisor = x.d_o.divisor;
    tensor_load(c.memory + at_stage + Shape::kOut, c.all.d_o, block * kValueBlock, divisor == 1 ? head : head / divisor, c.token(turn), c.batch(turn), barrier);
    return;
  }
  const bool copied =
      load_row_tile<kValueBlock>(c, c.rows_at(x.d_o, turn), c.pieces(kPiecesDOut), turn, block * kValueBlock, x.problem.V, at_stage + Shape::kOut);
  copied ? cp_async_arrive(barrier) : mbarrier_arrive(barrier);
}

// Of a stage that the engine brought: rows behind the last one of a packed sequence are the next one's; by all threads.
template <class Shape>
FW_DEVICE void clear_next_rows(const TurnChunk<Shape>& c, int stage, int turn) {
  if constexpr (Shape::kEngine) {
    const int rows = c.rows(turn);
    if (!c.all.engine || rows == kChunk || c.args.problem.sequences.offsets == nullptr) return;
    for (int item = c.thread; item < kChunk * 8; item += Shape::kThreads) {
      if (item / 8 >= rows) *reinterpret_cast<uint4*>(c.memory + stage + Shape::kOut + 16 * item) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
    sync_threads();
  }
}

template <class Shape>
FW_DEVICE void load_stage(const TurnChunk<Shape>& c, int stage, int turn, int block) {
  if (c.has(turn)) load_stage_images(c, stage, turn, block, c.tile(turn) * c.blocks + block);
}

// A and P, by one thread.
template <class Shape>
FW_DEVICE void load_pairs(const TurnChunk<Shape>& c, int turn) {
  if (!c.has(turn)) return;
  const PairImage& from = c.args.pairs[c.tile(turn)];
  const bool p = !c.args.v_is_dz;
  mbarrier_expect(c.pairs_barrier(), ((Shape::kOnline ? 1 : 0) + (p ? 1 : 0)) * kPanelBytes);
  if (Shape::kOnline) bulk_load(c.memory + Shape::kA, from.a, kPanelBytes, c.pairs_barrier());
  if (p) bulk_load(c.memory + Shape::kP, from.p, kPanelBytes, c.pairs_barrier());
}

// q and k.
template <class Shape>
FW_DEVICE void load_keys(const TurnChunk<Shape>& c, int turn) {
  if (!c.has(turn)) return;
  const Problem& x = c.args.problem;
  const int to = Shape::kRaw + c.key_offset(turn);
  const Rows q = c.rows_at(x.in.q, turn), k = c.rows_at(x.in.k, turn);
  bool copied = load_row_tile<Shape::kKey>(c, q, Shape::kStreams || (wide_rows(q) && x.K % 8 == 0), turn, 0, x.K, to);
  copied = load_row_tile<Shape::kKey>(c, k, Shape::kStreams || (wide_rows(k) && x.K % 8 == 0), turn, 0, x.K, to + Shape::kStateBytes) && copied;
  if (copied) {
    cp_async_arrive(c.key_barrier(turn));
  } else {
    cp_async_commit();
    cp_async_wait<0>();
    mbarrier_arrive(c.key_barrier(turn));
  }
}

// What is read without being copied ahead comes into the L2 cache; by the warps from kPrefetchWarp on.
inline constexpr int kPrefetchWarp = 7;
template <class Shape>
FW_DEVICE void prefetch_row_lines(const TurnChunk<Shape>& c, const Rows& from, int turn, int dim) {
  if (from.data == nullptr) return;
  const int size = from.bf16 != 0 ? 2 : 4, lines = (dim * size + 127) / 128, count = c.rows(turn) * lines;
  for (int item = c.thread - 32 * kPrefetchWarp; item < count; item += Shape::kThreads - 32 * kPrefetchWarp) {
    const int row = item / lines;
    prefetch_line(from.data + row * from.stride * size + (item - row * lines) * 128);
  }
}
template <class Shape>
FW_DEVICE void prefetch_turn(const TurnChunk<Shape>& c, int turn) {
  if (c.warp < kPrefetchWarp || !c.has(turn)) return;
  const Problem& p = c.args.problem;
  if (c.thread == 32 * kPrefetchWarp) bulk_prefetch(&c.args.pairs[c.tile(turn)], sizeof(PairImage));
  prefetch_row_lines(c, c.rows_at(p.in.v, turn), turn, p.V);
  prefetch_row_lines(c, c.rows_at(p.in.q, turn), turn, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.k, turn), turn, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.erase_key, turn), turn, p.K);
  prefetch_row_lines(c, c.rows_at(p.in.erase_gate, turn), turn, p.rule.erase == Gate::kScalar ? 1 : p.K);
  prefetch_row_lines(c, c.rows_at(p.in.write_gate, turn), turn, p.rule.write == Gate::kScalar ? 1 : p.V);
  prefetch_row_lines(c, c.workspace_rows(TurnChunk<Shape>::kM, p.H * p.K, turn), turn, p.K);
}

// The numbers of rows that a thread brings ahead: warps 2 and 3 beta of a row, warp 4 two log-decays.
template <class Shape>
FW_DEVICE float2 load_row_numbers(const TurnChunk<Shape>& c, int turn) {
  float2 x = make_float2(1, 0);
  if (c.warp < 2 || c.warp > 4 || !c.has(turn)) return x;
  const Problem& p = c.args.problem;
  const int rows = c.rows(turn);
  if (c.warp < 4) {
    if (p.rule.uses_beta() && c.thread - 64 < rows) x.x = load_element(c.rows_at(p.in.beta, turn), c.thread - 64, 0);
    return x;
  }
  const int row = 2 * c.lane;
  x.x = 0;
  if (p.rule.decay == Decay::kScalar) {
    const Rows g = c.rows_at(p.in.g, turn);
    if (row < rows) x.x = load_element(g, row, 0);
    if (row + 1 < rows) x.y = load_element(g, row + 1, 0);
  } else if (p.rule.decay == Decay::kConstant) {
    const float g = log1pf(-exp2f(-5.0f - static_cast<float>(c.hv(turn))));
    x = make_float2(row < rows ? g : 0.0f, row + 1 < rows ? g : 0.0f);
  }
  return x;
}

// By a warp: G of all rows, in units of log 2; rows past the end keep the last one's.
template <class Shape>
FW_DEVICE void sum_decay(const TurnChunk<Shape>& c, int turn, float2 g) {
  const float first = log2_decay(g.x), second = log2_decay(g.y);
  float sum = first + second;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  *reinterpret_cast<float2*>(c.turn_floats(Shape::kG, turn) + 2 * c.lane) = make_float2(sum - second, sum);
}

template <class Shape>
FW_DEVICE void publish_row_numbers(const TurnChunk<Shape>& c, int turn, float2 numbers) {
  if (c.warp == 2 || c.warp == 3) c.turn_floats(Shape::kBeta, turn)[c.thread - 64] = numbers.x;
  if constexpr (!Shape::kChannel) {
    if (c.warp == 4) sum_decay(c, turn, numbers);
  }
}

}  // namespace fw::cuda
