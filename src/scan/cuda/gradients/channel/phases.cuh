// Channel decay. Rows are grouped in blocks of 16, each with an anchor between its eighth row and its ninth. The streams carry the
// decay from the anchor to their row (r, e) or its inverse (w); the decay from one anchor to the next multiplies the accumulators as
// a product walks over the blocks, its own block included; what the states give comes along as the outermost term, from the chunk's
// start or end. For the inverse to be a number, decays of single tokens are bounded from below between pairs of rows (kLowestLog2Decay,
// as prepare does), and nowhere else: unbound_states().
// The anchored streams in bf16 also make dG: what two rows give each other then cancels there to float32.
#pragma once

#include "scan/cuda/gradients/channel/products.cuh"
#include "scan/cuda/gradients/general/rows.cuh"

namespace fw::cuda {

// In units of log 2. A row is at most 8 steps from its anchor: factors are at most 2^104. What should be nothing is 2^-13.
inline constexpr float kLowestLog2Decay = -13.0f;
// Below this over 8 rows, the decay from one anchor to the next may not be a number, but that of each half of the way is.
inline constexpr float kSteepDecay = -60.0f;

// Of dG, its 8-column pieces exchanged so that fragments come to lie on different banks.
template <class Shape>
FW_DEVICE float* decay_sum(const GradientChunk<Shape>& c, int row, int channel) {
  return c.floats(Shape::kDecaySums) + row * Shape::kKey + (channel ^ ((row & 3) << 3));
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

// Log-decays of the group's rows away from the anchor, 0 past the end. What lies as pairs of bf16 is brought a turn ahead.
struct DecayWords {
  uint32_t words[8];
};
template <class Shape>
FW_DEVICE DecayWords load_decay_words(const ChannelChunk<Shape>& c, int turn) {
  DecayWords x = {};
  if (!c.has(turn)) return x;
  const RowGroup<Shape> at(c);
  const int K = c.args.problem.K;
  const Rows from = c.rows_at(c.args.problem.in.g, turn);
  if (from.bf16 == 0 || !c.pieces(kPairsG)) return x;
  const int limit = at.channel < K ? c.rows(turn) : 0;
  const char* p = from.data + (at.row(0) * from.stride + at.channel) * 2;
  const int64_t step = from.stride * (at.before ? -2 : 2);
  FW_UNROLL
  for (int k = 0; k < 8; ++k) x.words[k] = at.row(k) < limit ? *reinterpret_cast<const uint32_t*>(p + k * step) : 0;
  return x;
}
template <class Shape>
FW_DEVICE void unpack_decays(const ChannelChunk<Shape>& c, int turn, const RowGroup<Shape>& at, const DecayWords& x, float2 (&g)[8]) {
  const int K = c.args.problem.K;
  const Rows from = c.rows_at(c.args.problem.in.g, turn);
  const bool pairs = c.pieces(kPairsG);
  if (from.bf16 != 0 && pairs) {
    FW_UNROLL
    for (int k = 0; k < 8; ++k) g[k] = make_float2(bf16_low(x.words[k]), bf16_high(x.words[k]));
    return;
  }
  FW_UNROLL
  for (int k = 0; k < 8; ++k) {
    g[k] = make_float2(0, 0);
    if (at.row(k) >= c.rows(turn)) continue;
    const int64_t i = at.row(k) * from.stride + at.channel;
    if (pairs && at.channel < K) {
      g[k] = *reinterpret_cast<const float2*>(from.data + 4 * i);
    } else if (!pairs) {
      if (at.channel < K) g[k].x = load_element(from, at.row(k), at.channel);
      if (at.channel + 1 < K) g[k].y = load_element(from, at.row(k), at.channel + 1);
    }
  }
}

// One pair, where speed does not matter.
template <class Shape>
FW_DEVICE float2 load_decay_pair(const ChannelChunk<Shape>& c, const Rows& g, int row, int channel) {
  const int K = c.args.problem.K;
  if constexpr (!Shape::kWhole) return load_pair(g, row, channel, K);
  if (channel >= K) return make_float2(0, 0);
  const char* p = g.data + (row * g.stride + channel) * (g.bf16 != 0 ? 2 : 4);
  if (g.bf16 == 0) return float2_at(reinterpret_cast<const float*>(p));
  const uint32_t word = *reinterpret_cast<const uint32_t*>(p);
  return make_float2(bf16_low(word), bf16_high(word));
}

// What is read without being copied ahead comes into the L2 cache, a tensor by a warpgroup. Not more than a turn ahead: it would be gone again.
template <class Shape>
FW_DEVICE void prefetch_chunk(const ChannelChunk<Shape>& c, int turn) {
  if (!c.has(turn)) return;
  const Problem& p = c.args.problem;
  const int row = (c.thread & 127) >> 1;
  int group = 0;
  const auto prefetch = [&](const Rows& from, int dim) {
    if (group++ % Shape::kGroups != c.group() || from.data == nullptr || row >= c.rows(turn)) return;
    const int size = from.bf16 != 0 ? 2 : 4;
    const char* line = from.data + row * from.stride * size;
    FW_NO_UNROLL
    for (int at = (c.thread & 1) * 128; at < dim * size; at += 256) prefetch_line(line + at);
  };
  if (c.thread == 0) bulk_prefetch(&c.args.pairs[c.tile_number(turn)], sizeof(PairImage));
  prefetch(c.rows_at(p.in.q, turn), p.K);
  prefetch(c.rows_at(p.in.k, turn), p.K);
  if (c.wants_values()) prefetch(c.rows_at(p.in.v, turn), p.V);
  prefetch(c.rows_at(p.in.g, turn), p.K);
  if (Shape::kGates) {
    prefetch(c.rows_at(p.in.erase_gate, turn), p.rule.erase == Gate::kScalar ? 1 : p.K);
    prefetch(c.rows_at(p.in.write_gate, turn), p.rule.write == Gate::kScalar ? 1 : p.V);
  }
  if (Shape::kMakesM) {
    prefetch(c.rows_before(turn), p.K);
  } else if (Shape::kPrecond || !Shape::kStreams) {
    prefetch(c.workspace_rows(TurnChunk<Shape>::kM, p.H * p.K, turn), p.K);
  }
  if (!Shape::kStreams || Shape::kOwnKey) prefetch(c.rows_at(p.in.erase_key, turn), p.K);
}

// What there is to decays of the chunk: nothing, steep ones, bounded ones.
enum class Decays { kMild, kSteep, kBounded };

// The factors from the anchors to the rows, and the decays over 8 rows.
template <class Shape>
FW_DEVICE void sum_channel_decay(const ChannelChunk<Shape>& c, int turn, const DecayWords& words) {
  const RowGroup<Shape> at(c);
  float2 g[8], sum = make_float2(0, 0);
  unpack_decays(c, turn, at, words, g);
  float lowest = 0;
  FW_UNROLL
  for (int k = 0; k < 8; ++k) {
    const float2 x = make_float2(g[k].x * kLog2E, g[k].y * kLog2E);
    lowest = min(lowest, min(x.x, x.y));
    const float2 all = make_float2(sum.x + max(x.x, kLowestLog2Decay), sum.y + max(x.y, kLowestLog2Decay));
    c.word(Shape::kFactors, at.row(k), at.channel) = pack_bf16(exp2_fast(at.before ? -sum.x : all.x), exp2_fast(at.before ? -sum.y : all.y));
    sum = all;
  }
  store_float2(c.floats(Shape::kHalves) + at.group * Shape::kKey + at.channel, exp2_fast(sum.x), exp2_fast(sum.y));
  const bool steep = warp_ballot(min(sum.x, sum.y) < kSteepDecay) != 0, bounded = warp_ballot(lowest < kLowestLog2Decay) != 0;
  if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = static_cast<float>(bounded ? Decays::kBounded : steep ? Decays::kSteep : Decays::kMild);
}

template <class Shape>
FW_DEVICE bool decays_are(const GradientChunk<Shape>& c, Decays least) {
  return warp_ballot(c.floats(Shape::kWarpSums)[c.lane % Shape::kWarps] >= static_cast<float>(least)) != 0;
}

// The decays between anchors: from the chunk's start to the first, ..., from the last to the end.
template <class Shape>
FW_DEVICE void join_decays(const GradientChunk<Shape>& c) {
  const RowGroup<Shape> at(c);
  if (at.group >= 5) return;
  const float* halves = c.floats(Shape::kHalves) + at.channel;
  const float2 one = make_float2(1, 1);
  const float2 low = at.group > 0 ? float2_at(halves + (2 * at.group - 1) * Shape::kKey) : one;
  const float2 high = at.group < 4 ? float2_at(halves + 2 * at.group * Shape::kKey) : one;
  store_float2(c.floats(Shape::kRatios) + at.group * Shape::kKey + at.channel, low.x * high.x, low.y * high.y);
}

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

// Where decays were bounded, the states' parts are made smaller by what the bound took on the way to the chunk's start (r, e) or end
// (w, D (.) S0).
template <class Shape>
FW_DEVICE void unbound_states(const ChannelChunk<Shape>& c, int turn, StreamSums& sums) {
  const Rows g = c.rows_at(c.args.problem.in.g, turn);
  float* totals = c.floats(Shape::kGroupSums);
  float up[4][4];  // what bounds took from the start of the row's eight up to it
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half, channel = c.column() + 8 * j;
      const float2 x = row < c.rows(turn) ? load_decay_pair(c, g, row, channel) : make_float2(0, 0);
      float* taken = up[j] + 2 * half;
      taken[0] = max(kLowestLog2Decay - log2_decay(x.x), 0.0f), taken[1] = max(kLowestLog2Decay - log2_decay(x.y), 0.0f);
      FW_UNROLL
      for (int delta = 4; delta < 32; delta *= 2) {
        const float a = shuffle_up(taken[0], delta), b = shuffle_up(taken[1], delta);
        if (c.lane >= delta) taken[0] += a, taken[1] += b;
      }
      if (c.lane >= 28) store_float2(totals + (2 * c.block_row() + half) * Shape::kKey + channel, taken[0], taken[1]);
    }
  }
  sync_threads();
  const RowGroup<Shape> at(c);
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
    float2 before = make_float2(0, 0), whole = before;
    FW_NO_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 x = float2_at(totals + i * Shape::kKey + c.column() + 8 * j);
      if (i < 2 * c.block_row()) before.x += x.x, before.y += x.y;
      if (i == 2 * c.block_row()) up[j][2] += x.x, up[j][3] += x.y;
      whole.x += x.x, whole.y += x.y;
    }
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float from_start = up[j][i] + (i % 2 == 0 ? before.x : before.y), to_end = (i % 2 == 0 ? whole.x : whole.y) - from_start;
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

// The sums with what the rows of the chunk give each other, as seen from the anchors. Leaves in kTails the sums over the rows of each
// block of w (.) the states' part of dw.
template <class Shape>
FW_DEVICE void walk_blocks(const GradientChunk<Shape>& c, StreamSums& sums) {
  const int own = c.block_row(), first = 32 * c.group();
  const bool steep = decays_are(c, Decays::kSteep);
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
    if (Shape::kOnline) load_left(t, c.base + Shape::kA, 16 * own, 16 * block, c.lane);
    FW_UNROLL
    for (int j = 0; j < 4; j += 2) {
      load_right(b, c.base + Shape::kWrite, 16 * block, first + 8 * j, c.lane);
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
      load_right(b, c.base + Shape::kRead, 16 * block, first + 8 * j, c.lane);
      mma_bf16(sums.w[j], p, b[0], b[1]);
      mma_bf16(sums.w[j + 1], p, b[2], b[3]);
      if (Shape::kOnline) {
        load_right(b, c.base + Shape::kErase, 16 * block, first + 8 * j, c.lane);
        mma_bf16(sums.w[j], t, b[0], b[1]);
        mma_bf16(sums.w[j + 1], t, b[2], b[3]);
      }
    }
  }
}

// The tail of dg of two channels: what the decay of the whole chunk does to the state, and the states' part of w.dw.
template <class Shape>
FW_DEVICE float2 channel_tail(const GradientChunk<Shape>& c, int channel) {
  float2 dots = make_float2(0, 0), rest = make_float2(1, 1), tail = make_float2(0, 0);
  [[maybe_unused]] constexpr int kUnroll = Shape::kKey == 128 ? 8 : 1;  // else there are too few registers
#pragma unroll(kUnroll)
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

// dG summed from the rows of a group up to its last, with the tail as a part of the chunk's last row.
template <class Shape>
FW_DEVICE void sum_decay_gradient(const GradientChunk<Shape>& c, float2 (&x)[8]) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  float2 sum = group == 7 ? channel_tail(c, channel) : make_float2(0, 0);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = float2_at(decay_sum(c, 8 * group + i, channel));
  FW_UNROLL
  for (int i = 7; i >= 0; --i) {
    sum.x += x[i].x, sum.y += x[i].y;
    x[i] = sum;
  }
  store_float2(c.floats(Shape::kGroupSums) + group * Shape::kKey + channel, sum.x, sum.y);
}

// dg. A bounded decay enters the pairs as larger than it is, and so does its gradient.
template <class Shape>
FW_DEVICE void store_channel_decay_gradient(const ChannelChunk<Shape>& c, int turn, bool bounded, float2 (&x)[8]) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2, K = c.args.problem.K;
  const Rows out = c.rows_at(c.args.grads.d.g, turn);
  if (out.data == nullptr) return;
  const float* sums = c.floats(Shape::kGroupSums) + channel;
  float2 later = make_float2(0, 0);
  FW_NO_UNROLL
  for (int i = 7; i > group; --i) {
    const float2 y = float2_at(sums + i * Shape::kKey);
    later.x += y.x, later.y += y.y;
  }
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i].x += later.x, x[i].y += later.y;
  const int rows = c.rows(turn) - 8 * group;
  const int64_t t = 8 * group;
  if (bounded) {
    const Rows g = c.rows_at(c.args.problem.in.g, turn);
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 step = i < rows ? load_decay_pair(c, g, static_cast<int>(t) + i, channel) : make_float2(0, 0);
      x[i].x *= exp2_fast(min(log2_decay(step.x) - kLowestLog2Decay, 0.0f));
      x[i].y *= exp2_fast(min(log2_decay(step.y) - kLowestLog2Decay, 0.0f));
    }
  }
  if (!c.pieces(kPairsDG)) {
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < rows) store_pair(out, t + i, channel, K, x[i]);
    }
    return;
  }
  const int limit = channel < K ? rows : 0;
  if (out.bf16 != 0) {
    char* p = out.data + (t * out.stride + channel) * 2;
    FW_UNROLL
    for (int i = 0; i < 8; ++i, p += 2 * out.stride) {
      if (i < limit) *reinterpret_cast<uint32_t*>(p) = pack_bf16(x[i].x, x[i].y);
    }
  } else {
    char* p = out.data + (t * out.stride + channel) * 4;
    FW_UNROLL
    for (int i = 0; i < 8; ++i, p += 4 * out.stride) {
      if (i < limit) *reinterpret_cast<float2*>(p) = x[i];
    }
  }
}

}  // namespace fw::cuda
