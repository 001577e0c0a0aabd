// Scalar decay: what a chunk's gradients start from, on the way for later turns.
#pragma once

#include "scan/cuda/device/gradient_products.cuh"
#include "scan/cuda/device/gradient_scalar_layout.cuh"

namespace fw::cuda {

FW_DEVICE bool wide_rows(const Rows& x) { return x.bf16 != 0 && x.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0; }

// 64 rows x kColumns columns from `column` on into a tile. What can be copied as it is comes without waiting:
// returns whether.
template <int kColumns, class Shape>
FW_DEVICE bool load_row_tile(const ScalarChunk<Shape>& c, const Rows& from, int turn, int column, int limit, int to) {
  constexpr int kGranules = kColumns / 8;
  const int rows = c.rows(turn), first = c.first(turn);
  const bool wide = from.data != nullptr && wide_rows(from) && limit % 8 == 0;
  FW_UNROLL
  for (int item = c.thread; item < 64 * kGranules; item += Shape::kThreads) {
    const int row = item / kGranules, in_tile = item % kGranules * 8;
    const bool valid = from.data != nullptr && row < rows && column + in_tile < limit;
    const int64_t t = first + row;
    if (wide) {
      cp_async_16(c.base + to + panel_offset(row, in_tile), valid ? from.data + 2 * (t * from.stride + column + in_tile) : from.data, valid);
      continue;
    }
    float x[8] = {};
    if (valid) load_channels(from, t, column + in_tile, limit, x);
    *reinterpret_cast<uint4*>(c.memory + to + panel_offset(row, in_tile)) = pack_8(x);
  }
  return wide;
}

// Images and dO of a value block.
template <class Shape>
FW_DEVICE void load_stage(const ScalarChunk<Shape>& c, int stage, int turn, int block) {
  if (!c.has(turn)) return;
  const GradientArgs& x = c.args;
  const int at_stage = stage * Shape::kStageBytes;
  uint64_t* barrier = c.barrier(stage);
  if (c.thread == 0) {
    char* to = c.memory + at_stage;
    const int64_t at = c.tile(turn) * c.blocks + block;
    mbarrier_expect(barrier, 2 * kPanelBytes + 2 * Shape::kStateBytes);
    bulk_load(to + Shape::kW, x.w + at * kPanel, kPanelBytes, barrier);
    bulk_load(to + Shape::kV, x.v + at * kPanel, kPanelBytes, barrier);
    bulk_load(to + Shape::kState, x.states + at * (64 * Shape::kKey), Shape::kStateBytes, barrier);
    bulk_load(to + Shape::kDState, x.d_states + at * (64 * Shape::kKey), Shape::kStateBytes, barrier);
  }
  const bool copied = load_row_tile<kValueBlock>(c, c.rows_at(x.d_o, turn), turn, block * kValueBlock, x.problem.V, at_stage + Shape::kOut);
  copied ? cp_async_arrive(barrier) : mbarrier_arrive(barrier);
}

// A and P, by one thread.
template <class Shape>
FW_DEVICE void load_pairs(const ScalarChunk<Shape>& c, int turn) {
  if (!c.has(turn)) return;
  const PairImage& from = c.args.pairs[c.tile(turn)];
  mbarrier_expect(c.pairs_barrier(), (Shape::kOnline ? 2 : 1) * kPanelBytes);
  if (Shape::kOnline) bulk_load(c.memory + Shape::kA, from.a, kPanelBytes, c.pairs_barrier());
  bulk_load(c.memory + Shape::kP, from.p, kPanelBytes, c.pairs_barrier());
}

template <class Shape>
FW_DEVICE void load_keys(const ScalarChunk<Shape>& c, int turn) {
  if (!Shape::kFast || !c.has(turn)) return;
  const Problem& x = c.args.problem;
  load_row_tile<Shape::kKey>(c, c.rows_at(x.in.q, turn), turn, 0, x.K, Shape::kRead + c.key_offset(turn));
  load_row_tile<Shape::kKey>(c, c.rows_at(x.in.k, turn), turn, 0, x.K, Shape::kWrite + c.key_offset(turn));
  cp_async_arrive(c.key_barrier(turn));
}

// What is read without being copied ahead comes into the L2 cache.
template <class Shape>
FW_DEVICE void prefetch_row_lines(const ScalarChunk<Shape>& c, const TokenArg& tensor, int turn, int dim) {
  if (tensor.data == nullptr) return;
  const Rows from = c.rows_at(tensor, turn);
  const int size = from.bf16 != 0 ? 2 : 4, lines = (dim * size + 127) / 128, count = c.rows(turn) * lines;
  for (int item = c.thread; item < count; item += Shape::kThreads) {
    prefetch_line(from.data + (c.first(turn) + item / lines) * from.stride * size + item % lines * 128);
  }
}
template <class Shape>
FW_DEVICE void prefetch_turn(const ScalarChunk<Shape>& c, int turn) {
  if (!c.has(turn)) return;
  const Problem& p = c.args.problem;
  if (c.thread == 0) bulk_prefetch(&c.args.pairs[c.tile(turn)], sizeof(PairImage));
  prefetch_row_lines(c, p.in.v, turn, p.V);
  if (Shape::kFast) return;
  prefetch_row_lines(c, p.in.q, turn, p.K);
  prefetch_row_lines(c, p.in.k, turn, p.K);
  prefetch_row_lines(c, p.in.erase_key, turn, p.K);
  prefetch_row_lines(c, p.in.erase_gate, turn, p.rule.erase == Gate::kScalar ? 1 : p.K);
  prefetch_row_lines(c, p.in.write_gate, turn, p.rule.write == Gate::kScalar ? 1 : p.V);
  if (p.m == nullptr) return;
  const float* m = p.m + ((first_token(p.sequences, c.n(turn)) + c.first(turn)) * p.H + c.hv(turn) / p.group) * p.K;
  const int lines = (p.K + 31) / 32, count = c.rows(turn) * lines;
  for (int item = c.thread; item < count; item += Shape::kThreads) prefetch_line(m + static_cast<int64_t>(item / lines) * p.H * p.K + item % lines * 32);
}

// The numbers of rows that a thread brings a turn ahead: warps 0 and 1 beta of row `thread`, warp 2 two log-decays, in units of log 2.
template <class Shape>
FW_DEVICE float2 load_row_numbers(const ScalarChunk<Shape>& c, int turn) {
  float2 x = make_float2(1, 0);
  if (c.warp > 2 || !c.has(turn)) return x;
  const Problem& p = c.args.problem;
  const int rows = c.rows(turn);
  if (c.warp < 2) {
    if (p.rule.uses_beta() && c.thread < rows) x.x = load_element(c.rows_at(p.in.beta, turn), c.first(turn) + c.thread, 0);
    return x;
  }
  const int row = 2 * c.lane;
  x.x = 0;
  if (p.rule.decay == Decay::kScalar) {
    const Rows g = c.rows_at(p.in.g, turn);
    if (row < rows) x.x = load_element(g, c.first(turn) + row, 0);
    if (row + 1 < rows) x.y = load_element(g, c.first(turn) + row + 1, 0);
  } else if (p.rule.decay == Decay::kConstant) {
    const float g = log1pf(-exp2f(-5.0f - static_cast<float>(c.hv(turn))));
    x = make_float2(row < rows ? g : 0.0f, row + 1 < rows ? g : 0.0f);
  }
  return x;
}

// By warp 2: G of all rows; rows past the end keep the last one's.
template <class Shape>
FW_DEVICE void sum_decay(const ScalarChunk<Shape>& c, float2 g) {
  const float first = log2_decay(g.x), second = log2_decay(g.y);
  float sum = first + second;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  c.floats(Shape::kG)[2 * c.lane] = sum - second;
  c.floats(Shape::kG)[2 * c.lane + 1] = sum;
}

}  // namespace fw::cuda
