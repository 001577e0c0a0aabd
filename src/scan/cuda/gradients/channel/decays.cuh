// Channel decay: a chunk's log-decays on their way into the anchored streams' factors, and their gradient on its way
// out. Where they are logits (FusedGates) the values are made on the way in, and the logits' gradient on the way out.
// The loops of that are not unrolled: all that a work tile runs has to fit the instruction cache.
#pragma once

#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/gradients/channel/chunk.cuh"
#include "scan/cuda/gradients/rows.cuh"

namespace fw::cuda {

// In units of log 2. A row is at most 8 steps from its anchor: factors are at most 2^104. What should be nothing is
// 2^-13.
inline constexpr float kLowestLog2Decay = -13.0f;
// Below this over 8 rows, the decay from one anchor to the next may not be a number, but that of each half of the way
// is.
inline constexpr float kSteepDecay = -60.0f;

// Of dG, its 8-column pieces exchanged so that fragments come to lie on different banks.
template <class Shape>
FW_DEVICE float* decay_sum(const GradientChunk<Shape>& c, int row, int channel) {
  return c.floats(Shape::kDecaySums) + row * Shape::kTileK + (channel ^ ((row & 3) << 3));
}

// The same of what is summed of it.
template <class Shape>
FW_DEVICE float* fused_sum(const GradientChunk<Shape>& c, int row, int channel) {
  return decay_sum(c, row, channel) + (Shape::kFusedSums - Shape::kDecaySums) / 4;
}

FW_DEVICE float2 float2_at(const float* p) { return *reinterpret_cast<const float2*>(p); }
FW_DEVICE void store_float2(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }

// Eight threads share two channels, eight rows each: group 2 b has those of block b before the anchor, 2 b + 1 those
// after it.
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

// Log-decays of the group's rows away from the anchor, 0 past the end. What lies as pairs of bf16 is loaded a work tile
// ahead.
struct DecayWords {
  uint32_t words[8];
  GateScalars<2> own;  // where they are logits
};
// Where log-decays are logits: the laws of two channels of the work tile's head.
struct DecayLaws {
  DecayLaw low, high;
  FW_DEVICE DecayLaws(const GateLaw<float>& law, const GateScalars<2>& own)
      : low(law, own.bias[0], own.rate[0]), high(law, own.bias[1], own.rate[1]) {}
};
template <class Shape>
FW_DEVICE GateScalars<2> decay_scalars(const ChannelChunk<Shape>& c, int work_tile, int channel) {
  const FusedGates& fused = c.args.problem.fused;
  return gate_scalars<2>(fused.a_log, fused.dt_bias, c.hv(work_tile), channel < c.args.problem.K ? channel : 0);
}
// The work tile's logits come into the L2 cache again, since they are wanted a second time at its end and others have
// come over them.
template <class Shape>
FW_DEVICE void prefetch_logits(const ChannelChunk<Shape>& c, int work_tile) {
  const Rows from = c.rows_at(c.args.problem.in.g, work_tile);
  const int row = (c.thread & 127) >> 1, at = (c.thread & 1) * 64;
  if (c.thread < 128 && row < c.rows(work_tile) && at < c.args.problem.K)
    prefetch_line(from.data + 2 * (row * from.stride + at));
}
template <class Shape>
FW_DEVICE DecayWords load_decay_words(const ChannelChunk<Shape>& c, int work_tile) {
  DecayWords x = {};
  if (!c.has(work_tile)) return x;
  const RowGroup<Shape> at(c);
  const int K = c.args.problem.K;
  if constexpr (Shape::kFused) x.own = decay_scalars(c, work_tile, at.channel);
  const Rows from = c.rows_at(c.args.problem.in.g, work_tile);
  if (from.bf16 == 0 || !c.pieces(kVec2G)) return x;
  const int limit = at.channel < K ? c.rows(work_tile) : 0;
  const char* p = from.data + (at.row(0) * from.stride + at.channel) * 2;
  const int64_t step = from.stride * (at.before ? -2 : 2);
  FW_UNROLL
  for (int k = 0; k < 8; ++k) x.words[k] = at.row(k) < limit ? *reinterpret_cast<const uint32_t*>(p + k * step) : 0;
  return x;
}
template <class Shape>
FW_DEVICE void unpack_decays(const ChannelChunk<Shape>& c, int work_tile, const RowGroup<Shape>& at,
                             const DecayWords& x, float2 (&g)[8]) {
  const int K = c.args.problem.K;
  const Rows from = c.rows_at(c.args.problem.in.g, work_tile);
  const bool pairs = c.pieces(kVec2G);
  if (from.bf16 != 0 && pairs) {
    FW_UNROLL
    for (int k = 0; k < 8; ++k) g[k] = make_float2(bf16_low(x.words[k]), bf16_high(x.words[k]));
    return;
  }
  FW_UNROLL
  for (int k = 0; k < 8; ++k) {
    g[k] = make_float2(0, 0);
    if (at.row(k) >= c.rows(work_tile)) continue;
    const int64_t i = at.row(k) * from.stride + at.channel;
    if (pairs && at.channel < K) {
      g[k] = *reinterpret_cast<const float2*>(from.data + 4 * i);
    } else if (!pairs) {
      if (at.channel < K) g[k].x = load_element(from, at.row(k), at.channel);
      if (at.channel + 1 < K) g[k].y = load_element(from, at.row(k), at.channel + 1);
    }
  }
}

// The rows of log-decays. Where they are fused and one of the chunk is bounded keep_fused() has made them: in place
// of their gradients, which are not there yet.
template <class Shape>
FW_DEVICE Rows decay_rows(const ChannelChunk<Shape>& c, int work_tile) {
  return Shape::kFused ? c.rows_at(c.args.grads.d.g, work_tile) : c.rows_at(c.args.problem.in.g, work_tile);
}
template <class Shape>
FW_DEVICE void keep_fused(const ChannelChunk<Shape>& c, int work_tile) {
  const RowGroup<Shape> at(c);
  const DecayWords x = load_decay_words(c, work_tile);
  const DecayLaws laws(c.args.problem.fused.g, x.own);
  const Rows to = decay_rows(c, work_tile);
  const int limit = at.channel < c.args.problem.K ? c.rows(work_tile) : 0;
  with_decay_law(c.args.problem.fused.g, [&](auto sigmoid) {
    FW_UNROLL
    for (int k = 0; k < 8; ++k) {
      const uint32_t word = fused_decays<sigmoid.value>(laws.low, laws.high, x.words[k]);
      if (at.row(k) < limit) *reinterpret_cast<uint32_t*>(to.data + (at.row(k) * to.stride + at.channel) * 2) = word;
    }
  });
  sync_threads();
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

// What there is to decays of the chunk: nothing, steep ones, bounded ones.
enum class Decays { kMild, kSteep, kBounded };

// The sums of two channels' decays from a group's anchor on, in units of log 2, and the factors that come of them.
struct GroupDecays {
  float2 sum = make_float2(0, 0);
  float lowest = 0;

  // A row further: the two factors, from the anchor to the row.
  FW_DEVICE uint32_t next(float2 g, bool before) {
    const float2 x = make_float2(g.x * kLog2E, g.y * kLog2E);
    lowest = min(lowest, min(x.x, x.y));
    const float2 all = make_float2(sum.x + max(x.x, kLowestLog2Decay), sum.y + max(x.y, kLowestLog2Decay));
    const uint32_t factors = pack_bf16(exp2_fast(before ? -sum.x : all.x), exp2_fast(before ? -sum.y : all.y));
    sum = all;
    return factors;
  }
  // Over all of its rows.
  template <class Shape>
  FW_DEVICE void publish(const ChannelChunk<Shape>& c, const RowGroup<Shape>& at) const {
    store_float2(c.floats(Shape::kHalfDecays) + at.group * Shape::kTileK + at.channel, exp2_fast(sum.x),
                 exp2_fast(sum.y));
    const bool steep = warp_ballot(min(sum.x, sum.y) < kSteepDecay) != 0,
               bounded = warp_ballot(lowest < kLowestLog2Decay) != 0;
    if (c.lane == 0)
      c.floats(Shape::kWarpSums)[c.warp] = static_cast<float>(bounded ? Decays::kBounded
                                                              : steep ? Decays::kSteep
                                                                      : Decays::kMild);
  }
};
// The factors from the anchors to the rows, and the decays over 8 rows.
template <class Shape>
FW_DEVICE void sum_channel_decay(const ChannelChunk<Shape>& c, int work_tile, const DecayWords& words) {
  const RowGroup<Shape> at(c);
  GroupDecays decays;
  if constexpr (Shape::kFused) {
    // Through the factors' memory, which is the thread's own here, so that a loop finds them.
    FW_UNROLL
    for (int k = 0; k < 8; ++k) c.word(Shape::kFactors, at.row(k), at.channel) = words.words[k];
    const DecayLaws laws(c.args.problem.fused.g, words.own);
    const int limit = at.channel < c.args.problem.K ? c.rows(work_tile) : 0;
    with_decay_law(c.args.problem.fused.g, [&](auto sigmoid) {
#pragma unroll 2
      for (int k = 0; k < 8; ++k) {
        uint32_t& word = c.word(Shape::kFactors, at.row(k), at.channel);
        const uint32_t g = at.row(k) < limit ? fused_decays<sigmoid.value>(laws.low, laws.high, word) : 0;
        word = decays.next(make_float2(bf16_low(g), bf16_high(g)), at.before);
      }
    });
  } else {
    float2 g[8];
    unpack_decays(c, work_tile, at, words, g);
    FW_UNROLL
    for (int k = 0; k < 8; ++k) c.word(Shape::kFactors, at.row(k), at.channel) = decays.next(g[k], at.before);
  }
  decays.publish(c, at);
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
  const float* half_decays = c.floats(Shape::kHalfDecays) + at.channel;
  const float2 one = make_float2(1, 1);
  const float2 low = at.group > 0 ? float2_at(half_decays + (2 * at.group - 1) * Shape::kTileK) : one;
  const float2 high = at.group < 4 ? float2_at(half_decays + 2 * at.group * Shape::kTileK) : one;
  store_float2(c.floats(Shape::kRatios) + at.group * Shape::kTileK + at.channel, low.x * high.x, low.y * high.y);
}

// The tail of dg of two channels: what the decay of the whole chunk does to the state, and the states' part of w.dw.
template <class Shape>
FW_DEVICE float2 channel_tail(const GradientChunk<Shape>& c, int channel) {
  float2 dots = make_float2(0, 0), decay = make_float2(1, 1), tail = make_float2(0, 0);
  [[maybe_unused]] constexpr int kUnroll = Shape::kTileK == 128 ? 8 : 1;  // else there are too few registers
#pragma unroll(kUnroll)
  for (int i = 7; i >= 0; --i) {
    const float2 f = float2_at(c.floats(Shape::kHalfDecays) + i * Shape::kTileK + channel),
                 dot = float2_at(c.floats(Shape::kStateDots) + i * Shape::kTileK + channel);
    decay.x *= f.x, decay.y *= f.y;
    dots.x += dot.x, dots.y += dot.y;
    if (i % 2 == 0) continue;
    const float2 part = float2_at(c.floats(Shape::kTails) + i / 2 * Shape::kTileK + channel);
    tail.x += part.x * decay.x, tail.y += part.y * decay.y;
  }
  return make_float2(tail.x + decay.x * dots.x, tail.y + decay.y * dots.y);
}

// What log-decays that came after a group take, of the sums that sum_decay_gradient() has left.
template <class Shape>
FW_DEVICE float2 later_groups(const GradientChunk<Shape>& c, int group, int channel) {
  const float* sums = c.floats(Shape::kGroupSums) + channel;
  float2 later = make_float2(0, 0);
  FW_NO_UNROLL
  for (int i = 7; i > group; --i) {
    const float2 y = float2_at(sums + i * Shape::kTileK);
    later.x += y.x, later.y += y.y;
  }
  return later;
}
// What a bound on a log-decay leaves of its gradient.
FW_DEVICE float2 bounded_share(float2 g) {
  return make_float2(exp2_fast(min(log2_decay(g.x) - kLowestLog2Decay, 0.0f)),
                     exp2_fast(min(log2_decay(g.y) - kLowestLog2Decay, 0.0f)));
}

// dG summed from the rows of a group up to its last, with the tail as a part of the chunk's last row.
template <class Shape>
FW_DEVICE void sum_decay_gradient(const GradientChunk<Shape>& c, float2 (&x)[8]) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  float2 sum = group == 7 ? channel_tail(c, channel) : make_float2(0, 0);
  if constexpr (Shape::kGroupSums == Shape::kHalfDecays) sync_threads();  // the tail has been made of these
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = float2_at(decay_sum(c, 8 * group + i, channel));
  FW_UNROLL
  for (int i = 7; i >= 0; --i) {
    sum.x += x[i].x, sum.y += x[i].y;
    x[i] = sum;
  }
  store_float2(c.floats(Shape::kGroupSums) + group * Shape::kTileK + channel, sum.x, sum.y);
}

// The sums over the work tile's rows, in order; between barriers.
template <class Shape>
FW_DEVICE void sum_fused(const ChannelChunk<Shape>& c, int work_tile) {
  const int K = c.args.problem.K, which = c.thread / Shape::kTileK, channel = c.thread % Shape::kTileK;
  if (c.args.form_parts == nullptr || which > 1 || channel >= K) return;
  const float* from = c.floats(which == 0 ? Shape::kStateDots : Shape::kRateSums) + channel;
  float sum = 0;
  FW_UNROLL
  for (int i = 0; i < 8; ++i) sum += from[i * Shape::kTileK];
  c.args.form_parts[(2 * c.tile(work_tile) + which) * K + channel] = sum;
}

// dg. A bounded decay enters the pairs as larger than it is, and so does its gradient.
template <class Shape>
FW_DEVICE void store_channel_decay_gradient(const ChannelChunk<Shape>& c, int work_tile, bool bounded, float2 (&x)[8]) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2, K = c.args.problem.K;
  const Rows out = c.rows_at(c.args.grads.d.g, work_tile);
  if (out.data == nullptr) return;
  const float2 later = later_groups(c, group, channel);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) x[i].x += later.x, x[i].y += later.y;
  const int rows = c.rows(work_tile) - 8 * group;
  const int64_t t = 8 * group;
  if (bounded) {
    const Rows g = decay_rows(c, work_tile);
    FW_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 step = i < rows ? load_decay_pair(c, g, static_cast<int>(t) + i, channel) : make_float2(0, 0);
      const float2 share = bounded_share(step);
      x[i].x *= share.x, x[i].y *= share.y;
    }
  }
  if (!c.pieces(kVec2DG)) {
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

// The same of logits. What the thread sums stays its own, as do the logits, which it reads again, where the factors
// were.
template <class Shape>
FW_DEVICE void sum_fused_gradient(const ChannelChunk<Shape>& c, int work_tile) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  const Rows logits = c.rows_at(c.args.problem.in.g, work_tile);
  const int limit = channel < c.args.problem.K ? c.rows(work_tile) - 8 * group : 0;
  const char* p = logits.data + (8 * group * logits.stride + channel) * 2;
  uint32_t words[8];
  FW_UNROLL
  for (int i = 0; i < 8; ++i, p += 2 * logits.stride) words[i] = i < limit ? *reinterpret_cast<const uint32_t*>(p) : 0;
  float2 sum = group == 7 ? channel_tail(c, channel) : make_float2(0, 0);
#pragma unroll 4
  for (int i = 7; i >= 0; --i) {
    const float2 x = float2_at(decay_sum(c, 8 * group + i, channel));
    sum.x += x.x, sum.y += x.y;
    store_float2(fused_sum(c, 8 * group + i, channel), sum.x, sum.y);
  }
  store_float2(c.floats(Shape::kGroupSums) + group * Shape::kTileK + channel, sum.x, sum.y);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) c.word(Shape::kFactors, 8 * group + i, channel) = words[i];
}
// The logits' gradients; and what dt_bias and a_log take of them, where sum_fused() finds it.
template <class Shape>
FW_DEVICE void store_fused_gradient(const ChannelChunk<Shape>& c, int work_tile, bool bounded) {
  const int group = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  const float2 later = later_groups(c, group, channel);
  const DecayLaws laws(c.args.problem.fused.g, decay_scalars(c, work_tile, channel));
  const Rows out = decay_rows(c, work_tile);
  const int limit = channel < c.args.problem.K ? c.rows(work_tile) - 8 * group : 0;
  char* p = out.data + (8 * group * out.stride + channel) * 2;
  float2 of_bias = make_float2(0, 0), of_rate = of_bias;
  with_decay_law(c.args.problem.fused.g, [&](auto sigmoid) {
#pragma unroll 2
    for (int i = 0; i < 8; ++i, p += 2 * out.stride) {
      const uint32_t word = c.word(Shape::kFactors, 8 * group + i, channel);
      const float2 sum = float2_at(fused_sum(c, 8 * group + i, channel));
      const float2 low = decay_slopes<sigmoid.value>(laws.low, bf16_low(word)),
                   high = decay_slopes<sigmoid.value>(laws.high, bf16_high(word));
      float2 d = i < limit ? make_float2(sum.x + later.x, sum.y + later.y) : make_float2(0, 0);
      if (bounded && i < limit) {
        const float2 share = bounded_share(load_decay_pair(c, out, 8 * group + i, channel));
        d.x *= share.x, d.y *= share.y;
      }
      of_rate.x = fmaf(d.x, low.y, of_rate.x), of_rate.y = fmaf(d.y, high.y, of_rate.y);
      d.x *= low.x, d.y *= high.x;
      of_bias.x += d.x, of_bias.y += d.y;
      if (i < limit) *reinterpret_cast<uint32_t*>(p) = pack_bf16(d.x, d.y);
    }
  });
  store_float2(c.floats(Shape::kStateDots) + group * Shape::kTileK + channel, of_bias.x, of_bias.y);
  store_float2(c.floats(Shape::kRateSums) + group * Shape::kTileK + channel, of_rate.x, of_rate.y);
}

}  // namespace fw::cuda
