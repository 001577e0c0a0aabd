// Channel decay. Rows are grouped in blocks of 16, each with an anchor between its eighth row and its ninth. The
// streams carry the decay from the anchor to their row (r, e) or its inverse (w). The decay from one anchor to the next
// multiplies the accumulators as a product walks over the blocks, its own block included. What the states give comes
// along as the outermost term, from the chunk's start or end. For the inverse to be a number, decays of single tokens
// are bounded from below between pairs of rows (kLowestLog2Decay, as prepare does), and nowhere else: unbound_states().
// The anchored streams in bf16 also make dG: what two rows give each other then cancels there to float32.
#pragma once

#include "scan/cuda/gradients/channel/decays.cuh"
#include "scan/cuda/gradients/channel/products.cuh"

namespace fw::cuda {

// r, -e, w from r, e, w: anchored.
FW_DEVICE void anchor_8(const uint4& factors, float (&r)[8], float (&e)[8], float (&w)[8]) {
  float f[8];
  unpack_8(factors, f);
  FW_UNROLL
  for (int j = 0; j < 8; ++j) {
    r[j] *= f[j];
    e[j] *= -f[j];
    w[j] *= rcp_fast(f[j]);
  }
}

// Where decays were bounded, the states' parts are made smaller by what the bound took on the way to the chunk's start
// (r, e) or end (w, D (.) S0).
template <class Shape>
FW_DEVICE void unbound_states(const ChannelChunk<Shape>& c, int work_tile, StreamSums& sums) {
  if constexpr (Shape::kFused) keep_fused(c, work_tile);
  const Rows g = decay_rows(c, work_tile);
  float* totals = c.floats(Shape::kBoundSums);
  float up[4][4];  // what bounds took from the start of the row's eight up to it
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half, channel = c.column() + 8 * j;
      const float2 x = row < c.rows(work_tile) ? load_decay_pair(c, g, row, channel) : make_float2(0, 0);
      float* taken = up[j] + 2 * half;
      taken[0] = max(kLowestLog2Decay - log2_decay(x.x), 0.0f),
      taken[1] = max(kLowestLog2Decay - log2_decay(x.y), 0.0f);
      FW_UNROLL
      for (int delta = 4; delta < 32; delta *= 2) {
        const float a = shuffle_up(taken[0], delta), b = shuffle_up(taken[1], delta);
        if (c.lane >= delta) taken[0] += a, taken[1] += b;
      }
      if (c.lane >= 28) store_float2(totals + (2 * c.block_row() + half) * Shape::kTileK + channel, taken[0], taken[1]);
    }
  }
  sync_threads();
  const RowGroup<Shape> at(c);
  float2 all = make_float2(0, 0);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float2 x = float2_at(totals + i * Shape::kTileK + at.channel);
    all.x += x.x, all.y += x.y;
  }
  float* dots = c.floats(Shape::kStateDots) + at.group * Shape::kTileK + at.channel;
  store_float2(dots, dots[0] * exp2_fast(-all.x), dots[1] * exp2_fast(-all.y));
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    float2 before = make_float2(0, 0), whole = before;
    FW_NO_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 x = float2_at(totals + i * Shape::kTileK + c.column() + 8 * j);
      if (i < 2 * c.block_row()) before.x += x.x, before.y += x.y;
      if (i == 2 * c.block_row()) up[j][2] += x.x, up[j][3] += x.y;
      whole.x += x.x, whole.y += x.y;
    }
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float from_start = up[j][i] + (i % 2 == 0 ? before.x : before.y),
                  to_end = (i % 2 == 0 ? whole.x : whole.y) - from_start;
      sums.r[j][i] *= exp2_fast(-from_start);
      sums.e[j][i] *= exp2_fast(-from_start);
      sums.w[j][i] *= exp2_fast(min(-to_end, 0.0f));
    }
  }
}

// x, y *= the decay at offset `from`.
template <class Shape>
FW_DEVICE void decay_sums(const GradientChunk<Shape>& c, int from, float (&x)[4][4], float (&y)[4][4]) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float2 f = float2_at(c.floats(from) + c.column() + 8 * j);
    x[j][0] *= f.x, x[j][1] *= f.y, x[j][2] *= f.x, x[j][3] *= f.y;
    if (Shape::kDelta) y[j][0] *= f.x, y[j][1] *= f.y, y[j][2] *= f.x, y[j][3] *= f.y;
  }
}
template <class Shape>
FW_DEVICE void decay_sums(const GradientChunk<Shape>& c, int from, float (&x)[4][4]) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float2 f = float2_at(c.floats(from) + c.column() + 8 * j);
    x[j][0] *= f.x, x[j][1] *= f.y, x[j][2] *= f.x, x[j][3] *= f.y;
  }
}
// Offsets of the decay over 8 rows, and of the decay to anchor `anchor` from the one before (the chunk's start, end).
// Without kJoinsDecays only the first and the last are there.
template <class Shape>
FW_DEVICE int half_decay(int half) {
  return Shape::kHalfDecays + half * Shape::kTileK * 4;
}
template <class Shape>
FW_DEVICE int decay_between(int anchor) {
  if constexpr (Shape::kJoinsDecays) {
    return Shape::kRatios + anchor * Shape::kTileK * 4;
  } else {
    return half_decay<Shape>(anchor == 0 ? 0 : 7);
  }
}

// The sums of x[2 j + i] (columns 8 j + i from column() on) over the lanes that have the same columns, as row
// `block_row` of kTails. A lane keeps half of its sums each time.
template <class Shape>
FW_DEVICE void store_tails(const GradientChunk<Shape>& c, float (&x)[8]) {
  FW_UNROLL
  for (int kept = 4; kept > 0; kept /= 2) {
    const int mask = 4 * kept;
    const bool upper = (c.lane & mask) != 0;
    FW_UNROLL
    for (int i = 0; i < kept; ++i) {
      const float sent = upper ? x[i] : x[kept + i], own = upper ? x[kept + i] : x[i];
      x[i] = own + shuffle_xor(sent, mask);
    }
  }
  const int index = ((c.lane & 16) != 0 ? 4 : 0) + ((c.lane & 8) != 0 ? 2 : 0) + ((c.lane & 4) != 0 ? 1 : 0);
  c.floats(Shape::kTails)[c.block_row() * Shape::kTileK + c.column() + index / 2 * 8 + index % 2] = x[0];
}

// Adds x (.) the warp's tile of an anchored stream to d_g; 16 columns from 8 j on.
template <class Shape>
FW_DEVICE void add_dots(const GradientChunk<Shape>& c, int tile, int j, const float (&x)[4][4], float (&d_g)[4][4]) {
  uint32_t words[4];
  load_left(words, c.base + tile, 16 * c.block_row(), 32 * c.group() + 8 * j, c.lane);
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    float* to = d_g[j + i / 2] + i % 2 * 2;
    const float* from = x[j + i / 2] + i % 2 * 2;
    to[0] += bf16_low(words[i]) * from[0];
    to[1] += bf16_high(words[i]) * from[1];
  }
}

// The sums with what the rows of the chunk give each other, as seen from the anchors. Leaves in kTails the sums over
// the rows of each block of w (.) the states' part of dw.
template <class Shape>
FW_DEVICE void walk_blocks(const GradientChunk<Shape>& c, StreamSums& sums) {
  const int own = c.block_row(), first = 32 * c.group();
  const bool steep = !Shape::kJoinsDecays || decays_are(c, Decays::kSteep);
  {
    float dots[4][4] = {}, tails[8];
    add_dots(c, Shape::kWrite, 0, sums.w, dots);
    add_dots(c, Shape::kWrite, 2, sums.w, dots);
    FW_UNROLL
    for (int j = 0; j < 4; ++j) tails[2 * j] = dots[j][0] + dots[j][2], tails[2 * j + 1] = dots[j][1] + dots[j][3];
    store_tails(c, tails);
  }

  FW_NO_UNROLL
  for (int block = 0; block <= own; ++block) {
    int ratio = decay_between<Shape>(block);
    if (steep && block > 0) {
      decay_sums(c, half_decay<Shape>(2 * block - 1), sums.r, sums.e);
      ratio = half_decay<Shape>(2 * block);
    }
    decay_sums(c, ratio, sums.r, sums.e);
    uint32_t p[4], t[4], b[4];
    load_left(p, c.base + Shape::kP, 16 * own, 16 * block, c.lane);
    if (Shape::kDelta) load_left(t, c.base + Shape::kA, 16 * own, 16 * block, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, c.base + Shape::kWrite, 16 * block, first + 8 * j, c.lane);
      mma_bf16(sums.r[j], p, b[0], b[1]);
      mma_bf16(sums.r[j + 1], p, b[2], b[3]);
      if (Shape::kDelta) {
        mma_bf16(sums.e[j], t, b[0], b[1]);
        mma_bf16(sums.e[j + 1], t, b[2], b[3]);
      }
    }
  }
  FW_NO_UNROLL
  for (int block = 3; block >= own; --block) {
    int ratio = decay_between<Shape>(block + 1);
    if (steep && block < 3) {
      decay_sums(c, half_decay<Shape>(2 * block + 2), sums.w);
      ratio = half_decay<Shape>(2 * block + 1);
    }
    decay_sums(c, ratio, sums.w);
    uint32_t p[4], t[4], b[4];
    load_left_transposed(p, c.base + Shape::kP, 16 * own, 16 * block, c.lane);
    if (Shape::kDelta) load_left_transposed(t, c.base + Shape::kA, 16 * own, 16 * block, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, c.base + Shape::kRead, 16 * block, first + 8 * j, c.lane);
      mma_bf16(sums.w[j], p, b[0], b[1]);
      mma_bf16(sums.w[j + 1], p, b[2], b[3]);
      if (Shape::kDelta) {
        load_right(b, c.base + Shape::kErase, 16 * block, first + 8 * j, c.lane);
        mma_bf16(sums.w[j], t, b[0], b[1]);
        mma_bf16(sums.w[j + 1], t, b[2], b[3]);
      }
    }
  }
}

}  // namespace fw::cuda
