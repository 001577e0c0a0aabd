// Scalar decay, and none: the decay between two rows is a factor of their entry in dP and dT.
#pragma once

#include "scan/cuda/device/gradient_products.cuh"

namespace fw::cuda {

// dP and dT with the decay, strictly below the diagonal, in bf16 in the place of P and A; the diagonal of dP apart.
template <class Shape>
FW_DEVICE void store_decayed_pairs(const GradientChunk<Shape>& c, const PairSums<Shape>& pairs) {
  const float* g = c.floats(Shape::kG);
  FW_UNROLL
  for (int j = 0; j < PairSums<Shape>::kTiles; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    if (column / 16 > c.block_row()) continue;
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      float p[2], t[2];
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float fall = g[row] - g[column + i], factor = row > column + i ? exp2_fast(fall < 0.0f ? fall : 0.0f) : 0.0f;
        p[i] = row > column + i ? pairs.p[j][2 * half + i] * factor : 0.0f;
        t[i] = row > column + i ? -pairs.t[j][2 * half + i] * factor : 0.0f;
        if (row == column + i) c.floats(Shape::kDiagonal)[row] = pairs.p[j][2 * half + i];
      }
      c.word(Shape::kP, row, column) = pack_bf16(p[0], p[1]);
      if (Shape::kOnline) c.word(Shape::kA, row, column) = pack_bf16(t[0], t[1]);
    }
  }
}

// dr, de, dw without the diagonal of dP. Returns this thread's part of the sum of w (.) the states' part of dw.
template <class Shape>
FW_DEVICE float finish_scalar(const GradientChunk<Shape>& c, StreamSums& sums) {
  constexpr int kR = Shape::kStreams, kE = kR + Shape::kStateBytes, kW = kE + Shape::kStateBytes;
  const float* g = c.floats(Shape::kG);
  const int block = c.block_row(), first = 32 * c.group();
  const float gamma[2] = {exp2_fast(g[c.row()]), exp2_fast(g[c.row() + 8])};
  const float rest[2] = {exp2_fast(g[63] - g[c.row()]), exp2_fast(g[63] - g[c.row() + 8])};
  float dot = 0;
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t w = c.word(kW, c.row() + 8 * half, c.column() + 8 * j);
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        sums.r[j][i] *= gamma[half];
        sums.e[j][i] *= -gamma[half];
        sums.w[j][i] *= rest[half];
        dot += (i % 2 == 0 ? bf16_low(w) : bf16_high(w)) * sums.w[j][i];
      }
    }
  }
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    uint32_t p[4], t[4], b[4];
    if (k <= block) {
      load_left(p, c.base + Shape::kP, 16 * block, 16 * k, c.lane);
      if (Shape::kOnline) load_left(t, c.base + Shape::kA, 16 * block, 16 * k, c.lane);
      FW_UNROLL
      for (int j = 0; j < 4; j += 2) {
        load_right(b, c.base + kW, 16 * k, first + 8 * j, c.lane);
        mma_bf16(sums.r[j], p, b[0], b[1]);
        mma_bf16(sums.r[j + 1], p, b[2], b[3]);
        if (Shape::kOnline) {
          mma_bf16(sums.e[j], t, b[0], b[1]);
          mma_bf16(sums.e[j + 1], t, b[2], b[3]);
        }
      }
    }
    if (k >= block) {
      load_left_transposed(p, c.base + Shape::kP, 16 * block, 16 * k, c.lane);
      if (Shape::kOnline) load_left_transposed(t, c.base + Shape::kA, 16 * block, 16 * k, c.lane);
      FW_UNROLL
      for (int j = 0; j < 4; j += 2) {
        load_right(b, c.base + kR, 16 * k, first + 8 * j, c.lane);
        mma_bf16(sums.w[j], p, b[0], b[1]);
        mma_bf16(sums.w[j + 1], p, b[2], b[3]);
        if (Shape::kOnline) {
          load_right(b, c.base + kE, 16 * k, first + 8 * j, c.lane);
          mma_bf16(sums.w[j], t, b[0], b[1]);
          mma_bf16(sums.w[j + 1], t, b[2], b[3]);
        }
      }
    }
  }
  return dot;
}

}  // namespace fw::cuda
