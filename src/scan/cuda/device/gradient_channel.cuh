// Channel decay. Rows are grouped in blocks of 8. Between blocks, a stream carries the decay from its row to the edge of its block
// (r, e: from the block's start; w: to the block's end), and the decay of whole blocks in between multiplies the accumulators as the
// product walks over the blocks; the states' part comes along as the outermost term. Inside a block the decay is a product of
// steps, exact in float32. So no exponent is above 0 and any log-decay is right.
// The anchored streams in bf16 also make dG: what two rows give each other then cancels there to float32.
#pragma once

#include "scan/cuda/device/gradient_products.cuh"

namespace fw::cuda {

template <class Shape>
FW_DEVICE float* plane(const GradientChunk<Shape>& c, int offset, int row, int channel) {
  return c.floats(offset) + row * Shape::kPlaneStride + channel;
}

// dP and dT below their diagonal blocks in bf16 in the place of P and A; the diagonal blocks in float32 apart, and dP's diagonal.
template <class Shape>
FW_DEVICE void store_block_pairs(const GradientChunk<Shape>& c, const PairSums<Shape>& pairs) {
  FW_UNROLL
  for (int j = 0; j < PairSums<Shape>::kTiles; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    if (column / 16 > c.block_row()) continue;
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      const float* p = pairs.p[j] + 2 * half;
      const float* t = pairs.t[j] + 2 * half;
      const bool below = row / 8 > column / 8;
      c.word(Shape::kP, row, column) = below ? pack_bf16(p[0], p[1]) : 0;
      if (Shape::kOnline) c.word(Shape::kA, row, column) = below ? pack_bf16(-t[0], -t[1]) : 0;
      if (row / 8 != column / 8) continue;
      const int at = row * 8 + column % 8;
      *reinterpret_cast<float2*>(c.floats(Shape::kDiagonalP) + at) = make_float2(p[0], p[1]);
      if (Shape::kOnline) *reinterpret_cast<float2*>(c.floats(Shape::kDiagonalT) + at) = make_float2(-t[0], -t[1]);
      if (row == column) c.floats(Shape::kDiagonal)[row] = p[0];
      if (row == column + 1) c.floats(Shape::kDiagonal)[row] = p[1];
    }
  }
}

// Factors to the edges of blocks, and the anchored streams. kFromStart holds sums and becomes factors.
template <class Shape>
FW_DEVICE void anchor_streams(const GradientChunk<Shape>& c) {
  const int block = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  const float2 all = *reinterpret_cast<const float2*>(plane(c, Shape::kFromStart, 8 * block + 7, channel));
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int row = 8 * block + i;
    float2& from = *reinterpret_cast<float2*>(plane(c, Shape::kFromStart, row, channel));
    const float2 to = make_float2(exp2_fast(all.x - from.x), exp2_fast(all.y - from.y));
    from = make_float2(exp2_fast(from.x), exp2_fast(from.y));
    *reinterpret_cast<float2*>(plane(c, Shape::kToEnd, row, channel)) = to;
    FW_UNROLL
    for (int stream = 0; stream < 3; ++stream) {
      if (stream == 1 && !Shape::kOnline) continue;
      const float2 factor = stream < 2 ? from : to;
      const uint32_t x = c.word(Shape::kStreams + stream * Shape::kStateBytes, row, channel);
      c.word(Shape::kAnchored + stream * Shape::kStateBytes, row, channel) = pack_bf16(factor.x * bf16_low(x), factor.y * bf16_high(x));
    }
  }
}

// x *= the decay of block `block`, of the first (kFirst) or the second 8 rows of the warp's tile or both.
template <bool kFirst, bool kSecond, class Shape>
FW_DEVICE void decay_sums(const GradientChunk<Shape>& c, int block, float (&x)[4][4], float (&y)[4][4]) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(c.floats(Shape::kRatio) + block * Shape::kKey + c.column() + 8 * j);
    if (kFirst) x[j][0] *= f.x, x[j][1] *= f.y, y[j][0] *= f.x, y[j][1] *= f.y;
    if (kSecond) x[j][2] *= f.x, x[j][3] *= f.y, y[j][2] *= f.x, y[j][3] *= f.y;
  }
}
template <bool kFirst, bool kSecond, class Shape>
FW_DEVICE void decay_sums(const GradientChunk<Shape>& c, int block, float (&x)[4][4]) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(c.floats(Shape::kRatio) + block * Shape::kKey + c.column() + 8 * j);
    if (kFirst) x[j][0] *= f.x, x[j][1] *= f.y;
    if (kSecond) x[j][2] *= f.x, x[j][3] *= f.y;
  }
}

// r, e += dP, dT [16 rows, block] times the anchored w.
template <class Shape>
FW_DEVICE void add_earlier(const GradientChunk<Shape>& c, int block, StreamSums& sums) {
  uint32_t a[4], w[4];
  load_left_8_of_two(a, c.base + Shape::kP, c.base + (Shape::kOnline ? Shape::kA : Shape::kP), 16 * c.block_row(), 8 * block, c.lane);
  load_right_8(w, c.base + Shape::kAnchored + 2 * Shape::kStateBytes, 8 * block, 32 * c.group(), c.lane);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    mma_bf16_k8(sums.r[j], a[0], a[1], w[j]);
    if (Shape::kOnline) mma_bf16_k8(sums.e[j], a[2], a[3], w[j]);
  }
}

// w += dP, dT [block, 16 rows]^T times the anchored r, e.
template <class Shape>
FW_DEVICE void add_later(const GradientChunk<Shape>& c, int block, StreamSums& sums) {
  uint32_t a[4], b[4];
  load_left_8_of_two_transposed(a, c.base + Shape::kP, c.base + (Shape::kOnline ? Shape::kA : Shape::kP), 16 * c.block_row(), 8 * block, c.lane);
  load_right_8(b, c.base + Shape::kAnchored, 8 * block, 32 * c.group(), c.lane);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) mma_bf16_k8(sums.w[j], a[0], a[1], b[j]);
  if (Shape::kOnline) {
    load_right_8(b, c.base + Shape::kAnchored + Shape::kStateBytes, 8 * block, 32 * c.group(), c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; ++j) mma_bf16_k8(sums.w[j], a[2], a[3], b[j]);
  }
}

// Two values of a tile in bf16, rows of half `half` of the warp's tile.
template <class Shape>
FW_DEVICE float2 stream_pair(const GradientChunk<Shape>& c, int stream, int half, int j) {
  const uint32_t x = c.word(Shape::kAnchored + stream * Shape::kStateBytes, c.row() + 8 * half, c.column() + 8 * j);
  return make_float2(bf16_low(x), bf16_high(x));
}

// dr, de, dw but for what rows of one block of 8 give each other, and their part of dG. Leaves in kTails the sums over the rows of w (.)
// the states' part of dw.
template <class Shape>
FW_DEVICE void finish_channel(const GradientChunk<Shape>& c, StreamSums& sums, float (&d_g)[4][4]) {
  const int low = 2 * c.block_row();  // block of the tile's first 8 rows
  if (Shape::kOnline) {
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      FW_UNROLL
      for (int i = 0; i < 4; ++i) sums.e[j][i] = -sums.e[j][i];
    }
  }
  FW_NO_UNROLL
  for (int block = 0; block < low; ++block) {
    decay_sums<true, true>(c, block, sums.r, sums.e);
    add_earlier(c, block, sums);
  }
  decay_sums<false, true>(c, low, sums.r, sums.e);
  add_earlier(c, low, sums);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 from = *reinterpret_cast<const float2*>(plane(c, Shape::kFromStart, c.row() + 8 * half, c.column() + 8 * j));
      const float2 r = stream_pair(c, 0, half, j);
      const int i = 2 * half;
      d_g[j][i] = r.x * sums.r[j][i];
      d_g[j][i + 1] = r.y * sums.r[j][i + 1];
      sums.r[j][i] *= from.x;
      sums.r[j][i + 1] *= from.y;
      if (!Shape::kOnline) continue;
      const float2 e = stream_pair(c, 1, half, j);
      d_g[j][i] += e.x * sums.e[j][i];
      d_g[j][i + 1] += e.y * sums.e[j][i + 1];
      sums.e[j][i] *= from.x;
      sums.e[j][i + 1] *= from.y;
    }
  }

  float2 rest[4];  // decay from the tile's second block to the chunk's end
  FW_UNROLL
  for (int j = 0; j < 4; ++j) rest[j] = make_float2(1, 1);
  FW_NO_UNROLL
  for (int block = 7; block > low + 1; --block) {
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(c.floats(Shape::kRatio) + block * Shape::kKey + c.column() + 8 * j);
      rest[j].x *= f.x, rest[j].y *= f.y;
    }
  }
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(c.floats(Shape::kRatio) + (low + 1) * Shape::kKey + c.column() + 8 * j);
    const float2 w0 = stream_pair(c, 2, 0, j), w1 = stream_pair(c, 2, 1, j);
    float x = rest[j].x * (f.x * w0.x * sums.w[j][0] + w1.x * sums.w[j][2]), y = rest[j].y * (f.y * w0.y * sums.w[j][1] + w1.y * sums.w[j][3]);
    FW_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) {
      x += shuffle_xor(x, mask);
      y += shuffle_xor(y, mask);
    }
    if (c.lane < 4) *reinterpret_cast<float2*>(c.floats(Shape::kTails) + c.block_row() * Shape::kKey + c.column() + 8 * j) = make_float2(x, y);
  }
  FW_NO_UNROLL
  for (int block = 7; block > low + 1; --block) {
    decay_sums<true, true>(c, block, sums.w);
    add_later(c, block, sums);
  }
  decay_sums<true, false>(c, low + 1, sums.w);
  add_later(c, low + 1, sums);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 to = *reinterpret_cast<const float2*>(plane(c, Shape::kToEnd, c.row() + 8 * half, c.column() + 8 * j));
      const float2 w = stream_pair(c, 2, half, j);
      const int i = 2 * half;
      d_g[j][i] -= w.x * sums.w[j][i];
      d_g[j][i + 1] -= w.y * sums.w[j][i + 1];
      sums.w[j][i] *= to.x;
      sums.w[j][i + 1] *= to.y;
    }
  }
}

// What the rows of a block of 8 give each other, added to the planes of dr, de, dw of two channels, and to dG, which it returns. step:
// the block's log-decays.
template <class Shape>
FW_DEVICE void add_diagonal_blocks(const GradientChunk<Shape>& c, int block, int channel, float2 (&step)[8], float2 (&d_g)[8]) {
  constexpr int kR = Shape::kStreams, kE = kR + Shape::kStateBytes, kW = kE + Shape::kStateBytes;
  const float* p = c.floats(Shape::kDiagonalP) + 64 * block;
  const float* t = c.floats(Shape::kDiagonalT) + 64 * block;
  float2 w[8], fall[8], dw[8];  // fall: decay from the row to the present one
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int row = 8 * block + i;
    const uint32_t w_word = c.word(kW, row, channel), r_word = c.word(kR, row, channel), e_word = Shape::kOnline ? c.word(kE, row, channel) : 0;
    const float2 r = make_float2(bf16_low(r_word), bf16_high(r_word)), e = make_float2(bf16_low(e_word), bf16_high(e_word));
    w[i] = make_float2(bf16_low(w_word), bf16_high(w_word));
    dw[i] = make_float2(0, 0);
    fall[i] = make_float2(1, 1);
    const float2 factor = make_float2(exp2_fast(step[i].x), exp2_fast(step[i].y));
    float2 dr = make_float2(0, 0), de = make_float2(0, 0);
    FW_UNROLL
    for (int j = 0; j < i; ++j) {
      fall[j].x *= factor.x, fall[j].y *= factor.y;
      const float p_ij = p[8 * i + j], t_ij = Shape::kOnline ? t[8 * i + j] : 0.0f;
      const float2 fw = make_float2(fall[j].x * w[j].x, fall[j].y * w[j].y);
      dr.x += p_ij * fw.x, dr.y += p_ij * fw.y;
      dw[j].x += fall[j].x * (p_ij * r.x + t_ij * e.x);
      dw[j].y += fall[j].y * (p_ij * r.y + t_ij * e.y);
      if (Shape::kOnline) de.x += t_ij * fw.x, de.y += t_ij * fw.y;
    }
    float2& g_sum = *reinterpret_cast<float2*>(plane(c, Shape::kFromStart, row, channel));
    g_sum = make_float2(g_sum.x + r.x * dr.x + e.x * de.x, g_sum.y + r.y * dr.y + e.y * de.y);
    float2& r_sum = *reinterpret_cast<float2*>(plane(c, 0, row, channel));
    r_sum = make_float2(r_sum.x + dr.x, r_sum.y + dr.y);
    if (Shape::kOnline) {
      float2& e_sum = *reinterpret_cast<float2*>(plane(c, Shape::kPlaneBytes, row, channel));
      e_sum = make_float2(e_sum.x + de.x, e_sum.y + de.y);
    }
  }
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float2 g_sum = *reinterpret_cast<const float2*>(plane(c, Shape::kFromStart, 8 * block + i, channel));
    d_g[i] = make_float2(g_sum.x - w[i].x * dw[i].x, g_sum.y - w[i].y * dw[i].y);
    float2& w_sum = *reinterpret_cast<float2*>(plane(c, 2 * Shape::kPlaneBytes, 8 * block + i, channel));
    w_sum = make_float2(w_sum.x + dw[i].x, w_sum.y + dw[i].y);
  }
}

}  // namespace fw::cuda
