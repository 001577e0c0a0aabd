// Channel decay. Rows are grouped in blocks of 16, each with an anchor between its eighth row and its ninth. The streams carry the
// decay from the anchor to their row (r, e) or its inverse (w); the decay from one anchor to the next multiplies the accumulators as
// a product walks over the blocks, its own block included; what the states give comes along as the outermost term, from the chunk's
// start or end. For the inverse to be a number, decays of single tokens are bounded from below between pairs of rows (kLowestDecay,
// as prepare does), and nowhere else: unbound_states().
// The anchored streams in bf16 also make dG: what two rows give each other then cancels there to float32.
#pragma once

#include "scan/cuda/device/gradient_products.cuh"

namespace fw::cuda {

// In units of log 2. A row is at most 8 steps from its anchor: factors are at most 2^104. What should be nothing is 2^-13.
inline constexpr float kLowestDecay = -13.0f;
// Below this over 8 rows, the decay from one anchor to the next may not be a number, but that of each half of the way is.
inline constexpr float kSteepDecay = -60.0f;

template <class Shape>
FW_DEVICE float* plane(const GradientChunk<Shape>& c, int offset, int row, int channel) {
  return c.floats(offset) + row * Shape::kPlaneStride + channel;
}

FW_DEVICE float2 float2_at(const float* p) { return *reinterpret_cast<const float2*>(p); }
FW_DEVICE void store_float2(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }

// Eight threads share two channels, eight rows each: group 2 b has those of block b before the anchor, 2 b + 1 those behind it.
template <class Shape>
struct RowGroup {
  int group, channel;
  bool before;
  FW_DEVICE explicit RowGroup(const GradientChunk<Shape>& c) {
    group = c.thread / Shape::kPairs;
    channel = c.thread % Shape::kPairs * 2;
    before = group % 2 == 0;
  }
  // Away from the anchor.
  FW_DEVICE int row(int k) const { return 8 * group + (before ? 7 - k : k); }
};

// Whether two neighbouring channels of every row are one aligned access.
FW_DEVICE bool in_pairs(const Rows& rows, int K) {
  return ((static_cast<int>(rows.stride) | K) & 1) == 0 && (reinterpret_cast<uintptr_t>(rows.data) & (rows.bf16 != 0 ? 3 : 7)) == 0;
}

// Log-decays of the group's rows away from the anchor, 0 past the end.
template <class Shape>
FW_DEVICE void load_decays(const GradientChunk<Shape>& c, const RowGroup<Shape>& at, float2 (&g)[8]) {
  const int K = c.args.problem.K, rows = c.rows();
  const Rows from = rows_of(c.args.problem.in.g, c.args.problem.sequences, c.n(), c.hv());
  if (!in_pairs(from, K)) {
    FW_NO_UNROLL
    for (int k = 0; k < 8; ++k) {
      const float2 x = at.row(k) < rows ? load_pair(from, c.first() + at.row(k), at.channel, K) : make_float2(0, 0);
      store_float2(plane(c, Shape::kFactors, at.row(k), at.channel), x.x, x.y);
    }
    FW_UNROLL
    for (int k = 0; k < 8; ++k) g[k] = float2_at(plane(c, Shape::kFactors, at.row(k), at.channel));
    return;
  }
  const int size = from.bf16 != 0 ? 2 : 4, step = static_cast<int>(from.stride) * (at.before ? -size : size), limit = at.channel < K ? rows : 0;
  const char* p = from.data + ((c.first() + at.row(0)) * from.stride + at.channel) * size;
  if (from.bf16 != 0) {
    uint32_t words[8];
    FW_UNROLL
    for (int k = 0; k < 8; ++k) words[k] = at.row(k) < limit ? *reinterpret_cast<const uint32_t*>(p + static_cast<int64_t>(k) * step) : 0;
    FW_UNROLL
    for (int k = 0; k < 8; ++k) g[k] = make_float2(bf16_low(words[k]), bf16_high(words[k]));
  } else {
    FW_UNROLL
    for (int k = 0; k < 8; ++k) g[k] = at.row(k) < limit ? *reinterpret_cast<const float2*>(p + static_cast<int64_t>(k) * step) : make_float2(0, 0);
  }
}

// What there is to decays of the chunk: nothing, steep ones, bounded ones.
enum class Decays { kMild, kSteep, kBounded };

// The factors from the anchors to the rows, and the decays over 8 rows.
template <class Shape>
FW_DEVICE void sum_channel_decay(const GradientChunk<Shape>& c) {
  const RowGroup<Shape> at(c);
  float2 g[8], sum = make_float2(0, 0);
  load_decays(c, at, g);
  float lowest = 0;
  FW_UNROLL
  for (int k = 0; k < 8; ++k) {
    const float2 x = make_float2(g[k].x * kLog2E, g[k].y * kLog2E);
    lowest = min(lowest, min(x.x, x.y));
    const float2 all = make_float2(sum.x + max(x.x, kLowestDecay), sum.y + max(x.y, kLowestDecay));
    store_float2(plane(c, Shape::kFactors, at.row(k), at.channel), exp2_fast(at.before ? -sum.x : all.x), exp2_fast(at.before ? -sum.y : all.y));
    sum = all;
  }
  store_float2(c.floats(Shape::kHalves) + at.group * Shape::kKey + at.channel, exp2_fast(sum.x), exp2_fast(sum.y));
  const bool steep = warp_ballot(min(sum.x, sum.y) < kSteepDecay) != 0, bounded = warp_ballot(lowest < kLowestDecay) != 0;
  if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = static_cast<float>(bounded ? Decays::kBounded : steep ? Decays::kSteep : Decays::kMild);
}

template <class Shape>
FW_DEVICE bool decays_are(const GradientChunk<Shape>& c, Decays least) {
  return warp_ballot(c.floats(Shape::kWarpSums)[c.lane % Shape::kWarps] >= static_cast<float>(least)) != 0;
}

// dP and -dT strictly below the diagonal in bf16 in the place of P and A; dP's diagonal apart.
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
      c.word(Shape::kP, row, column) = pack_bf16(row > column ? p[0] : 0.0f, row > column + 1 ? p[1] : 0.0f);
      if (Shape::kOnline) c.word(Shape::kA, row, column) = pack_bf16(row > column ? t[0] : 0.0f, row > column + 1 ? t[1] : 0.0f);
      if (row == column) c.floats(Shape::kDiagonal)[row] = p[0];
      if (row == column + 1) c.floats(Shape::kDiagonal)[row] = p[1];
    }
  }
}

FW_DEVICE uint4 scale_8(const uint4& x, const float (&f)[8]) {
  return make_uint4(pack_bf16(bf16_low(x.x) * f[0], bf16_high(x.x) * f[1]), pack_bf16(bf16_low(x.y) * f[2], bf16_high(x.y) * f[3]),
                    pack_bf16(bf16_low(x.z) * f[4], bf16_high(x.z) * f[5]), pack_bf16(bf16_low(x.w) * f[6], bf16_high(x.w) * f[7]));
}

// The anchored streams r, -e, w, and the decays between anchors: from the chunk's start to the first, ..., from the last to the end.
template <class Shape>
FW_DEVICE void anchor_streams(const GradientChunk<Shape>& c) {
  constexpr int kLanes = Shape::kKey / 8;
  const RowGroup<Shape> at(c);
  if (at.group < 5) {
    const float* halves = c.floats(Shape::kHalves) + at.channel;
    const float2 one = make_float2(1, 1);
    const float2 low = at.group > 0 ? float2_at(halves + (2 * at.group - 1) * Shape::kKey) : one;
    const float2 high = at.group < 4 ? float2_at(halves + 2 * at.group * Shape::kKey) : one;
    store_float2(c.floats(Shape::kRatios) + at.group * Shape::kKey + at.channel, low.x * high.x, low.y * high.y);
  }
  FW_NO_UNROLL
  for (int item = c.thread; item < kChunk * kLanes; item += Shape::kThreads) {
    const int row = item / kLanes, channel = item % kLanes * 8;
    const float* factors = plane(c, Shape::kFactors, row, channel);
    const float4 low = *reinterpret_cast<const float4*>(factors), high = *reinterpret_cast<const float4*>(factors + 4);
    float f[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const char* from = c.memory + Shape::kStreams + panel_offset(row, channel);
    char* to = c.memory + Shape::kAnchored + panel_offset(row, channel);
    *reinterpret_cast<uint4*>(to) = scale_8(*reinterpret_cast<const uint4*>(from), f);
    if (Shape::kOnline) {
      uint4 e = scale_8(*reinterpret_cast<const uint4*>(from + Shape::kStateBytes), f);
      constexpr uint32_t kSigns = 0x80008000u;
      *reinterpret_cast<uint4*>(to + Shape::kStateBytes) = make_uint4(e.x ^ kSigns, e.y ^ kSigns, e.z ^ kSigns, e.w ^ kSigns);
    }
    FW_UNROLL
    for (int j = 0; j < 8; ++j) f[j] = rcp_fast(f[j]);
    *reinterpret_cast<uint4*>(to + 2 * Shape::kStateBytes) = scale_8(*reinterpret_cast<const uint4*>(from + 2 * Shape::kStateBytes), f);
  }
}

// Where decays were bounded, the states' parts are made smaller by what the bound took on the way to the chunk's start (r, e) or end
// (w, D (.) S0).
template <class Shape>
FW_DEVICE void unbound_states(const GradientChunk<Shape>& c, StreamSums& sums) {
  const RowGroup<Shape> at(c);
  const float* totals = c.floats(Shape::kExcessTotals);
  {
    const Rows g = rows_of(c.args.problem.in.g, c.args.problem.sequences, c.n(), c.hv());
    float2 sum = make_float2(0, 0);
    FW_NO_UNROLL
    for (int row = 8 * at.group; row < 8 * at.group + 8; ++row) {
      const float2 x = row < c.rows() ? load_pair(g, c.first() + row, at.channel, c.args.problem.K) : make_float2(0, 0);
      sum.x += max(kLowestDecay - log2_decay(x.x), 0.0f);
      sum.y += max(kLowestDecay - log2_decay(x.y), 0.0f);
      *reinterpret_cast<float2*>(plane(c, Shape::kExcess, row, at.channel)) = sum;
    }
    *reinterpret_cast<float2*>(c.floats(Shape::kExcessTotals) + at.group * Shape::kKey + at.channel) = sum;
  }
  sync_threads();
  float2 all = make_float2(0, 0);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float2 x = float2_at(totals + i * Shape::kKey + at.channel);
    all.x += x.x, all.y += x.y;
  }
  float* dots = c.floats(Shape::kStateDots) + at.group * Shape::kKey + at.channel;
  store_float2(dots, dots[0] * exp2_fast(-all.x), dots[1] * exp2_fast(-all.y));
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    float2 before[3] = {};  // of all groups before the tile's first and second, and of all
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 x = float2_at(totals + i * Shape::kKey + c.column() + 8 * j);
      FW_UNROLL
      for (int k = 0; k < 3; ++k) {
        if (k < 2 && i >= 2 * c.block_row() + k) continue;
        before[k].x += x.x, before[k].y += x.y;
      }
    }
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 in_group = float2_at(plane(c, Shape::kExcess, c.row() + 8 * half, c.column() + 8 * j));
      const float up[2] = {before[half].x + in_group.x, before[half].y + in_group.y}, whole[2] = {before[2].x, before[2].y};
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float from_start = exp2_fast(-up[i]), to_end = exp2_fast(min(up[i] - whole[i], 0.0f));
        sums.r[j][2 * half + i] *= from_start;
        sums.e[j][2 * half + i] *= from_start;
        sums.w[j][2 * half + i] *= to_end;
      }
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
    if (Shape::kOnline) y[j][0] *= f.x, y[j][1] *= f.y, y[j][2] *= f.x, y[j][3] *= f.y;
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
// Offsets of the decay to anchor `anchor` from the one before (the chunk's start, end), and of the decay over 8 rows.
template <class Shape>
FW_DEVICE int decay_between(int anchor) {
  return Shape::kRatios + anchor * Shape::kKey * 4;
}
template <class Shape>
FW_DEVICE int half_decay(int half) {
  return Shape::kHalves + half * Shape::kKey * 4;
}

// The sums of x[2 j + i] (columns 8 j + i from column() on) over the lanes that have the same columns, as row `block_row` of kTails.
// A lane keeps half of its sums each time.
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
  c.floats(Shape::kTails)[c.block_row() * Shape::kKey + c.column() + index / 2 * 8 + index % 2] = x[0];
}

// Adds x (.) stream to d_g (subtracts: kMinus), stream being the warp's tile of an anchored stream; 16 columns from 8 j on.
template <bool kMinus, class Shape>
FW_DEVICE void add_dots(const GradientChunk<Shape>& c, int stream, int j, const float (&x)[4][4], float (&d_g)[4][4]) {
  uint32_t words[4];
  load_left(words, c.base + Shape::kAnchored + stream * Shape::kStateBytes, 16 * c.block_row(), 32 * c.group() + 8 * j, c.lane);
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    float* to = d_g[j + i / 2] + i % 2 * 2;
    const float* from = x[j + i / 2] + i % 2 * 2;
    to[0] += (kMinus ? -bf16_low(words[i]) : bf16_low(words[i])) * from[0];
    to[1] += (kMinus ? -bf16_high(words[i]) : bf16_high(words[i])) * from[1];
  }
}

// dr, de, dw without the diagonal of dP, and their part of dG. Leaves in kTails the sums over the rows of each block of w (.) the
// states' part of dw, as seen from the block's anchor.
template <class Shape>
FW_DEVICE void finish_channel(const GradientChunk<Shape>& c, StreamSums& sums, float (&d_g)[4][4]) {
  const int own = c.block_row(), first = 32 * c.group();
  const bool steep = decays_are(c, Decays::kSteep);
  const uint32_t r_tile = c.base + Shape::kAnchored, e_tile = r_tile + Shape::kStateBytes, w_tile = e_tile + Shape::kStateBytes;
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) d_g[j][i] = 0;
  }
  add_dots<false>(c, 2, 0, sums.w, d_g);
  add_dots<false>(c, 2, 2, sums.w, d_g);
  float tails[8];
  FW_UNROLL
  for (int j = 0; j < 4; ++j) tails[2 * j] = d_g[j][0] + d_g[j][2], tails[2 * j + 1] = d_g[j][1] + d_g[j][3];
  store_tails(c, tails);

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
    if (Shape::kOnline) load_left(t, c.base + Shape::kA, 16 * own, 16 * block, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, w_tile, 16 * block, first + 8 * j, c.lane);
      mma_bf16(sums.r[j], p, b[0], b[1]);
      mma_bf16(sums.r[j + 1], p, b[2], b[3]);
      if (Shape::kOnline) {
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
    if (Shape::kOnline) load_left_transposed(t, c.base + Shape::kA, 16 * own, 16 * block, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, r_tile, 16 * block, first + 8 * j, c.lane);
      mma_bf16(sums.w[j], p, b[0], b[1]);
      mma_bf16(sums.w[j + 1], p, b[2], b[3]);
      if (Shape::kOnline) {
        load_right(b, e_tile, 16 * block, first + 8 * j, c.lane);
        mma_bf16(sums.w[j], t, b[0], b[1]);
        mma_bf16(sums.w[j + 1], t, b[2], b[3]);
      }
    }
  }
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) d_g[j][i] = 0;
  }
  FW_UNROLL
  for (int j = 0; j < 4; j += 2) {
    add_dots<false>(c, 0, j, sums.r, d_g);
    if (Shape::kOnline) add_dots<false>(c, 1, j, sums.e, d_g);
    add_dots<true>(c, 2, j, sums.w, d_g);
  }
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 f = float2_at(plane(c, Shape::kFactors, c.row() + 8 * half, c.column() + 8 * j));
      const int i = 2 * half;
      sums.r[j][i] *= f.x;
      sums.r[j][i + 1] *= f.y;
      if (Shape::kOnline) sums.e[j][i] *= -f.x;
      if (Shape::kOnline) sums.e[j][i + 1] *= -f.y;
      sums.w[j][i] *= rcp_fast(f.x);
      sums.w[j][i + 1] *= rcp_fast(f.y);
    }
  }
}

template <class Shape>
FW_DEVICE void store_plane(const GradientChunk<Shape>& c, int offset, const float (&x)[4][4]) {
  float* at = plane(c, offset, c.row(), c.column());
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    store_float2(at + 8 * j, x[j][0], x[j][1]);
    store_float2(at + 8 * Shape::kPlaneStride + 8 * j, x[j][2], x[j][3]);
  }
}

// The tail of dg of two channels: what the decay of the whole chunk does to the state, and the states' part of w.dw.
template <class Shape>
FW_DEVICE float2 channel_tail(const GradientChunk<Shape>& c, int channel) {
  float2 dots = make_float2(0, 0), rest = make_float2(1, 1), tail = make_float2(0, 0);
  FW_UNROLL
  for (int i = 7; i >= 0; --i) {
    const float2 f = float2_at(c.floats(Shape::kHalves) + i * Shape::kKey + channel), dot = float2_at(c.floats(Shape::kStateDots) + i * Shape::kKey + channel);
    rest.x *= f.x, rest.y *= f.y;
    dots.x += dot.x, dots.y += dot.y;
    if (i % 2 == 0) continue;
    const float2 part = float2_at(c.floats(Shape::kTails) + i / 2 * Shape::kKey + channel);
    tail.x += part.x * rest.x, tail.y += part.y * rest.y;
  }
  return make_float2(tail.x + rest.x * dots.x, tail.y + rest.y * dots.y);
}

// dg from the plane of dG, with the tail as a part of the last row. A bounded decay enters the pairs as larger than it is, and its
// gradient too.
template <class Shape>
FW_DEVICE void channel_decay_gradient(const GradientChunk<Shape>& c) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2, K = c.args.problem.K;
  const bool bounded = decays_are(c, Decays::kBounded);
  float* d_g = plane(c, Shape::kFactors, 8 * group, channel);
  float2 x[8], sum = group == 7 ? channel_tail(c, channel) : make_float2(0, 0);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = float2_at(d_g + i * Shape::kPlaneStride);
  FW_UNROLL
  for (int i = 7; i >= 0; --i) {
    sum.x += x[i].x, sum.y += x[i].y;
    x[i] = sum;
  }
  float* sums = c.floats(Shape::kBlockSums) + channel;
  store_float2(sums + group * Shape::kKey, sum.x, sum.y);
  sync_threads();
  const Rows out = rows_of(c.args.grads.d.g, c.args.problem.sequences, c.n(), c.hv());
  if (out.data == nullptr) return;
  float2 later = make_float2(0, 0);
  for (int i = 7; i > group; --i) {
    const float2 y = float2_at(sums + i * Shape::kKey);
    later.x += y.x, later.y += y.y;
  }
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i].x += later.x, x[i].y += later.y;
  const int rows = c.rows() - 8 * group;
  if (bounded || !in_pairs(out, K)) {
    const Rows g = rows_of(c.args.problem.in.g, c.args.problem.sequences, c.n(), c.hv());
    FW_UNROLL
    for (int i = 0; i < 8; ++i) *reinterpret_cast<float2*>(d_g + i * Shape::kPlaneStride) = x[i];
    FW_NO_UNROLL
    for (int i = 0; i < 8 && i < rows; ++i) {
      const float2 y = float2_at(d_g + i * Shape::kPlaneStride), step = load_pair(g, c.first() + 8 * group + i, channel, K);
      const float x_part = exp2_fast(min(log2_decay(step.x) - kLowestDecay, 0.0f)), y_part = exp2_fast(min(log2_decay(step.y) - kLowestDecay, 0.0f));
      store_pair(out, c.first() + 8 * group + i, channel, K, make_float2(y.x * x_part, y.y * y_part));
    }
    return;
  }
  const int size = out.bf16 != 0 ? 2 : 4, limit = channel < K ? rows : 0;
  char* p = out.data + ((c.first() + 8 * group) * out.stride + channel) * size;
  const int64_t step = out.stride * size;
  if (out.bf16 != 0) {
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < limit) *reinterpret_cast<uint32_t*>(p + i * step) = pack_bf16(x[i].x, x[i].y);
    }
  } else {
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < limit) *reinterpret_cast<float2*>(p + i * step) = x[i];
    }
  }
}

}  // namespace fw::cuda
