// The products of a chunk that contract over tokens or values: R, dR, dZ, dP, dT and what the states give dr, de, dw.
#pragma once

#include "scan/cuda/device/gradient_loads.cuh"

namespace fw::cuda {

// The warp's tiles of the products [64, kKey], as products with the states first: dO S0^T, dZ S0^T, R D^T.
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

// x += left right with left lower triangular [64, 64] or (kTransposed) the transpose of one, right [64, 64] of values.
template <bool kTransposed, class Shape, int kTiles>
FW_DEVICE void triangular_product(const GradientChunk<Shape>& c, float (&x)[kTiles][4], int left, int right) {
  const int block = c.block_row();
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (kTransposed ? k < block : k > block) continue;
    uint32_t a[4], b[4];
    if (kTransposed) {
      load_left_transposed(a, c.base + left, 16 * block, 16 * k, c.lane);
    } else {
      load_left(a, c.base + left, 16 * block, 16 * k, c.lane);
    }
    FW_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      load_right(b, c.base + right, 16 * k, pair_column(c) + 8 * j, c.lane);
      mma_bf16(x[j], a, b[0], b[1]);
      mma_bf16(x[j + 1], a, b[2], b[3]);
    }
  }
}

// In a stage: W becomes R = A W, V becomes dR = P^T dO + V and then dZ = A^T dR (offline R = W, dZ = dR). Ends with a barrier.
template <class Shape>
FW_DEVICE void make_residuals(const GradientChunk<Shape>& c, int stage) {
  constexpr int kTiles = PairSums<Shape>::kTiles;
  float r[kTiles][4] = {}, d[kTiles][4];
  FW_UNROLL
  for (int j = 0; j < kTiles; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    const uint32_t low = c.word(stage + Shape::kV, c.row(), column), high = c.word(stage + Shape::kV, c.row() + 8, column);
    d[j][0] = bf16_low(low), d[j][1] = bf16_high(low), d[j][2] = bf16_low(high), d[j][3] = bf16_high(high);
  }
  if (Shape::kOnline) triangular_product<false>(c, r, Shape::kA, stage + Shape::kW);
  triangular_product<true>(c, d, Shape::kP, stage + Shape::kOut);
  sync_threads();
  if (Shape::kOnline) store_tile(c, stage + Shape::kW, r);
  store_tile(c, stage + Shape::kV, d);
  sync_threads();
  if constexpr (Shape::kOnline) {
    float z[kTiles][4] = {};
    triangular_product<true>(c, z, Shape::kA, stage + Shape::kV);
    sync_threads();
    store_tile(c, stage + Shape::kV, z);
    sync_threads();
  }
}

// Adds a stage's values to the products.
template <class Shape>
FW_DEVICE void add_products(const GradientChunk<Shape>& c, int stage, StreamSums& sums, PairSums<Shape>& pairs) {
  constexpr int kTiles = PairSums<Shape>::kTiles;
  const uint32_t at = c.base + stage;
  const int block = c.block_row();
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    uint32_t d_out[4], z[4], r[4], b[4];
    load_left(d_out, at + Shape::kOut, 16 * block, 16 * k, c.lane);
    load_left(r, at + Shape::kW, 16 * block, 16 * k, c.lane);
    if (Shape::kOnline) load_left(z, at + Shape::kV, 16 * block, 16 * k, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, at + Shape::kState, 16 * k, 32 * c.group() + 8 * j, c.lane);
      mma_bf16(sums.r[j], d_out, b[0], b[1]);
      mma_bf16(sums.r[j + 1], d_out, b[2], b[3]);
      if (Shape::kOnline) {
        mma_bf16(sums.e[j], z, b[0], b[1]);
        mma_bf16(sums.e[j + 1], z, b[2], b[3]);
      }
      load_right(b, at + Shape::kDState, 16 * k, 32 * c.group() + 8 * j, c.lane);
      mma_bf16(sums.w[j], r, b[0], b[1]);
      mma_bf16(sums.w[j + 1], r, b[2], b[3]);
    }
    FW_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      const int column = pair_column(c) + 8 * j;
      if (column > 16 * block) continue;
      load_right_transposed(b, at + Shape::kW, column, 16 * k, c.lane);
      mma_bf16(pairs.p[j], d_out, b[0], b[1]);
      mma_bf16(pairs.p[j + 1], d_out, b[2], b[3]);
      if (Shape::kOnline) {
        mma_bf16(pairs.t[j], z, b[0], b[1]);
        mma_bf16(pairs.t[j + 1], z, b[2], b[3]);
      }
    }
  }
}

// Four neighbouring columns from `i` on, in one access where the address allows it.
FW_DEVICE void store_four(const Rows& rows, int64_t t, int i, int limit, const float (&x)[4]) {
  char* p = rows.data + (t * rows.stride + i) * (rows.bf16 != 0 ? 2 : 4);
  if (i + 4 <= limit && rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  } else if (i + 4 <= limit && rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    store_channels(rows, t, i, limit, x);
  }
}

// The value side of a stage: dv, the channel write gate's gradient, and the rows' sums of v (.) c (.) dz, added to kDZv. 16 lanes a row,
// four columns each: the products of the stages are in registers at the same time.
template <class Shape>
FW_DEVICE void value_gradients(const GradientChunk<Shape>& c, int block, int stage) {
  constexpr int kLanes = kValueBlock / 4, kRows = Shape::kThreads / kLanes;
  const Problem& x = c.args.problem;
  const bool gated = x.rule.write == Gate::kChannel;
  const int in_block = c.thread % kLanes * 4, column = block * kValueBlock + in_block;
  FW_NO_UNROLL
  for (int row = c.thread / kLanes; row < kChunk; row += kRows) {
    float sum = 0;
    if (row < c.rows() && column < x.V) {
      const int t = c.first() + row;
      const uint2 packed = *reinterpret_cast<const uint2*>(c.memory + stage + Shape::kV + panel_offset(row, in_block));
      const float z_v = c.floats(Shape::kZv)[row];
      float dz[4] = {bf16_low(packed.x), bf16_high(packed.x), bf16_low(packed.y), bf16_high(packed.y)};
      float v[4], y[4];
      load_channels(rows_of(x.in.v, x.sequences, c.n(), c.hv()), t, column, x.V, v);
      if (gated) {
        float gate[4];
        load_channels(rows_of(x.in.write_gate, x.sequences, c.n(), c.hv()), t, column, x.V, gate);
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          y[j] = z_v * v[j] * dz[j];
          dz[j] *= gate[j];
        }
        const Rows dc = rows_of(c.args.grads.d.write_gate, x.sequences, c.n(), c.hv());
        if (dc.data != nullptr) store_four(dc, t, column, x.V, y);
      }
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        sum += v[j] * dz[j];
        y[j] = z_v * dz[j];
      }
      const Rows dv = rows_of(c.args.grads.d.v, x.sequences, c.n(), c.hv());
      if (dv.data != nullptr) store_four(dv, t, column, x.V, y);
    }
    sum = group_sum<kLanes>(sum);
    if (c.thread % kLanes == 0) c.floats(Shape::kDZv)[row] += sum;
  }
}

// D (.) S0 of a stage, summed over a quarter of an eighth of its values: rows 8 i .. 8 i + 7 of two channels.
template <class Shape>
FW_DEVICE void add_state_dots(const GradientChunk<Shape>& c, int stage, float2& sum) {
  const int row = c.thread / Shape::kPairs * 8, channel = c.thread % Shape::kPairs * 2;
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t s = c.word(stage + Shape::kState, row + i, channel), d = c.word(stage + Shape::kDState, row + i, channel);
    sum.x += bf16_low(s) * bf16_low(d);
    sum.y += bf16_high(s) * bf16_high(d);
  }
}

}  // namespace fw::cuda
