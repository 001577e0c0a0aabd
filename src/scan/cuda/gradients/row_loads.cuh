// Scalar decay: rows of a work tile and its numbers a row, from memory to shared memory.
#pragma once

#include "scan/cuda/gradients/products.cuh"

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
