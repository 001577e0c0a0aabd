// Scalar decay, and none: the decay between two rows is a factor of their entry in dP and dT. The phases of a chunk up
// to dr, de, dw.
#pragma once

#include "scan/cuda/gradients/row_loads.cuh"
#include "scan/cuda/gradients/tile_products.cuh"

namespace fw::cuda {

// Lanes over the rows of a stage: 8 columns each.
template <class Shape>
struct ValueLanes {
  static constexpr int kLanes = kValueBlock / 8, kRows = Shape::kThreads / kLanes, kPasses = kChunk / kRows;
};

// Sums over a row's values: of v (.) c (.) dz, or of R (.) dz where that makes the gain's gradient
// (gain_by_residual()). v_dz: with unscaled keys, of v (.) dz.
struct ValueSums {
  float gain = 0, v_dz = 0;
};

// v as it lies in memory, if it can be read so and is wanted.
template <class Shape>
struct ValueWords {
  using Lanes = ValueLanes<Shape>;
  uint4 v[Lanes::kPasses];
  bool wide;

  FW_DEVICE void load(const WorkTile<Shape>& c, int work_tile, int block) {
    const Problem& x = c.args.problem;
    const Rows rows = c.rows_at(x.in.v, work_tile);
    const int column = block * kValueBlock + c.thread % Lanes::kLanes * 8;
    wide = c.pieces(kVec16V) && c.wants_values();
    FW_UNROLL
    for (int i = 0; i < Lanes::kPasses; ++i) {
      const int row = c.thread / Lanes::kLanes + i * Lanes::kRows;
      v[i] = make_uint4(0, 0, 0, 0);
      if (wide && row < c.rows(work_tile) && column < x.V)
        v[i] = *reinterpret_cast<const uint4*>(rows.data + 2 * (row * rows.stride + column));
    }
  }
};

FW_DEVICE void unpack_8(const uint4& words, float (&x)[8]) {
  x[0] = bf16_low(words.x), x[1] = bf16_high(words.x), x[2] = bf16_low(words.y), x[3] = bf16_high(words.y);
  x[4] = bf16_low(words.z), x[5] = bf16_high(words.z), x[6] = bf16_low(words.w), x[7] = bf16_high(words.w);
}

// The value side of a stage: dv, the channel write gate's gradient, and this lane's part of the rows' sums.
template <class Shape>
FW_DEVICE void value_rows(const WorkTile<Shape>& c, int work_tile, int block, int stage, const ValueWords<Shape>& words,
                          ValueSums (&sums)[ValueLanes<Shape>::kPasses]) {
  using Lanes = ValueLanes<Shape>;
  const Problem& x = c.args.problem;
  const bool gated = Shape::kGates && x.rule.write == Gate::kChannel;
  const int in_block = c.thread % Lanes::kLanes * 8, column = block * kValueBlock + in_block;
  const Rows dv = c.rows_at(c.args.grads.d.v, work_tile);
  FW_UNROLL
  for (int i = 0; i < Lanes::kPasses; ++i) {
    const int row = c.thread / Lanes::kLanes + i * Lanes::kRows;
    if (row >= c.rows(work_tile) || column >= x.V) continue;
    const int t = row;
    float dz[8], v[8];
    const float z_v = c.floats(Shape::kZv)[row];
    const bool residual = c.residual_gains() && gain_by_residual(z_v);
    unpack_8(*reinterpret_cast<const uint4*>(c.memory + stage + Shape::kV + sw128_offset(row, in_block)), dz);
    if (Shape::kNoDecayFix || !residual) {
      if (words.wide) {
        unpack_8(words.v[i], v);
      } else {
        load_channels(c.rows_at(x.in.v, work_tile), t, column, x.V, v);
      }
    }
    if constexpr (Shape::kNoDecayFix) {
      FW_UNROLL
      for (int j = 0; j < 8; ++j) sums[i].v_dz += v[j] * dz[j];
    }
    if (residual)
      unpack_8(*reinterpret_cast<const uint4*>(c.memory + stage + Shape::kW + sw128_offset(row, in_block)), v);
    if (gated) {
      float gate[8], y[8];
      load_channels(c.rows_at(x.in.write_gate, work_tile), t, column, x.V, gate);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        y[j] = z_v * v[j] * dz[j];
        dz[j] *= gate[j];
      }
      const Rows dc = c.rows_at(c.args.grads.d.write_gate, work_tile);
      if (dc.data != nullptr) store_channels(dc, t, column, x.V, y);
    }
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      sums[i].gain += v[j] * dz[j];
      dz[j] *= z_v;
    }
    if (c.pieces(kVec16DV)) {
      *reinterpret_cast<uint4*>(dv.data + 2 * (t * dv.stride + column)) = pack_8(dz);
    } else if (dv.data != nullptr) {
      store_channels(dv, t, column, x.V, dz);
    }
  }
}

FW_DEVICE float dot_words(uint32_t x, uint32_t y, float sum) {
  return sum + bf16_low(x) * bf16_low(y) + bf16_high(x) * bf16_high(y);
}
FW_DEVICE float dot_16_bytes(const uint4& x, const uint4& y, float sum) {
  return dot_words(x.w, y.w, dot_words(x.z, y.z, dot_words(x.y, y.y, dot_words(x.x, y.x, sum))));
}

// This thread's part of the sum of D (.) S0 of a stage.
template <class Shape>
FW_DEVICE float dot_states(const WorkTile<Shape>& c, int stage, float sum) {
  const char* s = c.memory + stage + Shape::kState + 16 * c.thread;
  FW_UNROLL
  for (int i = 0; i < Shape::kStateBytes / 16 / Shape::kThreads; ++i) {
    const char* at = s + 16 * Shape::kThreads * i;
    sum = dot_16_bytes(*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + Shape::kStateBytes),
                       sum);
  }
  return sum;
}

// dg of a token is <S, D> before it, with the state before it decayed and D its gradient. From the chunk's end that is
// <S_C, D_C> and the sum over the rows after of r.dr + e.de - w.dw (recurrence.md 5). Each term there is as large as
// <S, D> where keys are alike and a gain above 1 turns the state around at every token. The terms alternate and cancel,
// and what their roundings leave is as large as a small <S, D>. But e.de - w.dw of a row is -z.dz, exactly, where
// nothing cancels. Sums of r.dr - z.dz do not fade with decays, as <S, D> does, so they are for chunks that decay by
// less than this, in log2 ...
inline constexpr float kNoDecay = -20.0f;
// ... from <S, D> at the chunk's start: <S0, D_C>, decayed, and the sums over its rows of what S0 has in r.dr and e.de.
// Where hardly anything decays states grow, and what one chunk's rows leave out of that is too much. Above this bound
// it is <S, D> as the scans have left both, where a sequence has a second chunk.
inline constexpr float kNoDecayScans = -1.0f;

// With unscaled keys. By the scans: S at the chunk's end, which the next chunk has, or, of the last chunk, D at its
// start, which the one before has: [blocks, 64, kTileK] as the scans left them. Else by the chunk's own rows.
template <class Shape>
struct NoDecayState {
  const char* state = nullptr;  // by the scans
  // still: dG of a row is r.dr - z.dz; at_start: <S, D> is that at the chunk's start
  bool still = false, at_start = false;

  FW_DEVICE NoDecayState(const WorkTile<Shape>& c, int work_tile) {
    if constexpr (!Shape::kNoDecayFix) return;
    const float decay = c.work_tile_floats(Shape::kG, work_tile)[63];
    still = at_start = decay > kNoDecay;
    const char* at = c.addresses(work_tile)[WorkTile<Shape>::kNoDecayState];
    if (!(decay > kNoDecayScans) || at == nullptr) return;
    at_start = (reinterpret_cast<uintptr_t>(at) & 1) != 0;
    state = at - (at_start ? 1 : 0);
  }
  FW_DEVICE bool by_scans() const { return Shape::kNoDecayFix && state != nullptr; }
  FW_DEVICE bool by_rows() const { return Shape::kNoDecayFix && still && state == nullptr; }
};
// This thread's part of it in a stage, on its way; none: zeros.
template <class Shape>
struct NoDecayWords {
  static constexpr int kWords = Shape::kNoDecayFix ? Shape::kStateBytes / 16 / Shape::kThreads : 0;
  uint4 words[kWords > 0 ? kWords : 1];

  FW_DEVICE NoDecayWords(const WorkTile<Shape>& c, const NoDecayState<Shape>& still, int block) {
    FW_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = make_uint4(0, 0, 0, 0);
      if (still.by_scans())
        words[i] = *reinterpret_cast<const uint4*>(still.state + block * Shape::kStateBytes +
                                                   16 * (c.thread + Shape::kThreads * i));
    }
  }
  // And of the sum of it (.) D or S of the stage.
  FW_DEVICE float dot(const WorkTile<Shape>& c, const NoDecayState<Shape>& still, int stage, float sum) const {
    const char* with = c.memory + stage + (still.at_start ? Shape::kState : Shape::kDState) + 16 * c.thread;
    FW_UNROLL
    for (int i = 0; i < kWords; ++i)
      sum = dot_16_bytes(words[i], *reinterpret_cast<const uint4*>(with + 16 * Shape::kThreads * i), sum);
    return sum;
  }
};

// dg of two rows of a lane, from dG and the tail, by a warp.
template <class Shape>
FW_DEVICE float2 decay_gradient(const WorkTile<Shape>& c, int work_tile, const float2& d, float tail) {
  float sum = d.x + d.y;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float after = shuffle_down(sum, delta);
    if (c.lane + delta < 32) sum += after;
  }
  if (NoDecayState<Shape>(c, work_tile).at_start) tail -= shuffle(sum, 0);
  return make_float2(sum + tail, sum - d.x + tail);
}
template <class Shape>
FW_DEVICE void store_decay_gradient(const WorkTile<Shape>& c, int work_tile, const float2& dg) {
  const Rows out = c.rows_at(c.args.grads.d.g, work_tile);
  const int row = 2 * c.lane;
  if (row < c.rows(work_tile)) store_element(out, row, 0, dg.x);
  if (row + 1 < c.rows(work_tile)) store_element(out, row + 1, 0, dg.y);
}

// dP and dT with the decay, strictly below the diagonal, in bf16 in place of P and A; the diagonal of dP apart.
template <class Shape>
FW_DEVICE void store_decayed_pairs(const WorkTile<Shape>& c, int work_tile, const PairSums<Shape>& pairs) {
  const float* g = c.work_tile_floats(Shape::kG, work_tile);
  const float g_row[2] = {g[c.row()], g[c.row() + 8]};
  FW_UNROLL
  for (int j = 0; j < PairSums<Shape>::kTiles; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    const float2 g_column = *reinterpret_cast<const float2*>(g + column);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      float p[2], t[2];
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float fall = g_row[half] - (i == 0 ? g_column.x : g_column.y),
                    factor = exp2_fast(fall < 0.0f ? fall : 0.0f);
        p[i] = row > column + i ? pairs.p[j][2 * half + i] * factor : 0.0f;
        t[i] = row > column + i ? -pairs.t[j][2 * half + i] * factor : 0.0f;
        if (row == column + i) c.floats(Shape::kDiagonal)[row] = pairs.p[j][2 * half + i];
      }
      pair_fragment(c, Shape::kP, half, j) = pack_bf16(p[0], p[1]);
      if (Shape::kDelta) pair_fragment(c, Shape::kA, half, j) = pack_bf16(t[0], t[1]);
    }
  }
}

// dr, de, dw without the diagonal of dP. Returns this thread's part of the sum of w (.) the states' part of dw; by_rows
// (NoDecayState): of r (.) that of dr and e (.) that of de.
template <class Shape>
FW_DEVICE float finish_streams(const WorkTile<Shape>& c, int work_tile, StreamSums& sums, bool by_rows) {
  const int r_tile = Shape::kRead + c.key_offset(work_tile), w_tile = Shape::kWrite + c.key_offset(work_tile);
  const float* g = c.work_tile_floats(Shape::kG, work_tile);
  const float gamma[2] = {exp2_fast(g[c.row()]), exp2_fast(g[c.row() + 8])};
  const float decay_to_end[2] = {exp2_fast(g[63] - g[c.row()]), exp2_fast(g[63] - g[c.row() + 8])};
  float dot = 0;
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t w = c.fragment(w_tile, half, j);
      uint32_t r = 0, e = 0;
      if (Shape::kNoDecayFix && by_rows) r = c.fragment(r_tile, half, j), e = c.fragment(Shape::kErase, half, j);
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        sums.r[j][i] *= gamma[half];
        sums.e[j][i] *= -gamma[half];
        sums.w[j][i] *= decay_to_end[half];
        const auto of = [i](uint32_t words) { return i % 2 == 0 ? bf16_low(words) : bf16_high(words); };
        dot += Shape::kNoDecayFix && by_rows ? of(r) * sums.r[j][i] + of(e) * sums.e[j][i] : of(w) * sums.w[j][i];
      }
    }
  }
  const uint32_t columns = c.base + key_columns(c), p = c.base + Shape::kP, t = c.base + Shape::kA;
  keep(flat(sums.r)), keep(flat(sums.w));
  if (Shape::kDelta) keep(flat(sums.e));
  wgmma_fence();
  start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.r), p, columns + w_tile);
  start_product<32, true, true, false, kProductForm<Shape>>(flat(sums.w), p, columns + r_tile);
  if (Shape::kDelta) {
    start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.e), t, columns + w_tile);
    start_product<32, true, true, false, kProductForm<Shape>>(flat(sums.w), t, columns + Shape::kErase);
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep(flat(sums.r)), keep(flat(sums.w));
  if (Shape::kDelta) keep(flat(sums.e));
  return dot;
}

// Sums over the quad of lanes that has a row's 32 columns of the group, for the threads that sum up the groups.
template <int kSums, class Shape, int kFirst = 0>
FW_DEVICE void store_row_sums(const WorkTile<Shape>& c, int row, float (&x)[kSums]) {
  FW_UNROLL
  for (int i = 0; i < kSums; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 2);
    if ((c.lane & 3) == 0) c.floats(Shape::kPartial)[((kFirst + i) * Shape::kGroups + c.group()) * 64 + row] = x[i];
  }
}
template <class Shape>
FW_DEVICE float row_sum(const WorkTile<Shape>& c, int sum, int row) {
  const float* x = c.floats(Shape::kPartial) + sum * Shape::kGroups * 64 + row;
  float y = x[0];
  FW_UNROLL
  for (int i = 1; i < Shape::kGroups; ++i) y += x[64 * i];
  return y;
}

// dg from dG of the rows and the tail, by one warp.
template <class Shape>
FW_DEVICE void store_decay_gradient(const WorkTile<Shape>& c, int work_tile) {
  if (c.rows_at(c.args.grads.d.g, work_tile).data == nullptr) return;
  float tail = 0;
  FW_UNROLL
  for (int i = 0; i < Shape::kWarps; ++i) tail += c.floats(Shape::kWarpSums)[i];
  store_decay_gradient(
      c, work_tile,
      decay_gradient(c, work_tile, *reinterpret_cast<const float2*>(c.floats(Shape::kDG) + 2 * c.lane), tail));
}

}  // namespace fw::cuda
