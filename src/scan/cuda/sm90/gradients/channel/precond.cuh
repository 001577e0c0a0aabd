// Channel decay: M of the preconditioner made by the gradient kernel, from A before each token (Problem::precond_rows),
// and the chunk's share of its gradients (PrecondShare). D, the gradient of A, is D = 0 after the chunk; at a row it is
//     D_t = sum over s >= t of exp(G_s - G_t) dM_s M'(A_s)          G: sums of the preconditioner's log-decay
// one more product of a triangle by a tile, and the products' fragments have all that is made of it.
#pragma once

#include "scan/cuda/gradients/channel/phases.cuh"

namespace fw::cuda {

// Of the chunk's rows, in shared memory: the preconditioner's log-decay and beta as they came. G in units of log 2
// (first the log-decays); the decay, the gain beta kn^2, and kn^2 (RunGates); the head's center, in each entry.
template <class Shape>
struct RowGateArrays {
  float *g, *beta, *log_decay, *decay, *gain, *kn2, *center;
  FW_DEVICE explicit RowGateArrays(const GradientChunk<Shape>& c) {
    g = c.floats(Shape::kRowGates), beta = g + 64, log_decay = g + 128, decay = g + 192, gain = g + 256, kn2 = g + 320,
    center = g + 384;
  }
};
// In log 2: a decay below it is 0 in float, and sums of 64 such steps keep their digits.
inline constexpr float kLowestRowDecay = -127.0f;

// The two gates of a row by a thread of warps 2 and 3, a work tile ahead, and the head's center: as load_beta(), with
// which they go.
struct PrecondWords {
  uint32_t g = 0, beta = 0;
  float center = 0;
};
template <class Shape>
FW_DEVICE PrecondWords load_precond_words(const ChannelChunk<Shape>& c, int work_tile) {
  PrecondWords x;
  const Problem& p = c.args.problem;
  const int row = c.thread - 64;
  if (c.warp < 2 || c.warp > 3 || !c.has(work_tile)) return x;
  if (row < c.rows(work_tile))
    x.g = load_row_bits(c, p.in.precond_g, work_tile, row),
    x.beta = load_row_bits(c, p.in.precond_beta, work_tile, row);
  if (p.rule.uses_precond_center()) x.center = global_memory(p.precond_center)[c.hv(work_tile) * p.center_stride];
  return x;
}
template <class Shape>
FW_DEVICE void publish_precond_words(const ChannelChunk<Shape>& c, const PrecondWords& x) {
  const Problem& p = c.args.problem;
  const RowGateArrays<Shape> rows(c);
  if (c.warp < 2 || c.warp > 3) return;
  rows.g[c.thread - 64] = value_of_bits(p.in.precond_g.bf16 != 0, x.g);
  rows.beta[c.thread - 64] = value_of_bits(p.in.precond_beta.bf16 != 0, x.beta);
  rows.center[c.thread - 64] = x.center;
}

// The work tile: what is made of it is made again instead of kept, where there are too few registers.
template <class Shape>
FW_DEVICE int again(int work_tile) {
  return Shape::kDelta ? opaque(work_tile) : work_tile;
}

// Gates of a row, for its threads; the first of them leaves them for all.
template <class Shape>
FW_DEVICE RunGates precond_gates(const ChannelChunk<Shape>& c, int row, bool first, float k2) {
  const RowGateArrays<Shape> rows(c);
  const float g = rows.g[row];
  const RunGates gates = run_gates(c.args.problem.rule, g, rows.beta[row], k2);
  if (first) {
    rows.log_decay[row] = max(g * kLog2E, kLowestRowDecay), rows.decay[row] = gates.alpha, rows.gain[row] = gates.gain,
    rows.kn2[row] = gates.kn2;
  }
  return gates;
}
template <class Shape>
FW_DEVICE PrecondMap<float> precond_of(const ChannelChunk<Shape>& c) {
  PrecondMap<float> map = c.all.precond;
  map.squashed = true, map.previous = false, map.center = RowGateArrays<Shape>(c).center[0];
  return map;
}

// By a warp: G of the rows.
template <class Shape>
FW_DEVICE void sum_row_decays(const ChannelChunk<Shape>& c) {
  const float2 steps = float2_at(RowGateArrays<Shape>(c).log_decay + 2 * c.lane);
  float sum = steps.x + steps.y;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  store_float2(RowGateArrays<Shape>(c).log_decay + 2 * c.lane, sum - steps.y, sum);
}

// Raw k and A before the rows as tiles, in place of a stage that is used up: fragments of them straight from memory
// would be 16 bytes at a time.
template <class Shape>
FW_DEVICE int key_tile(int stage) {
  return stage;
}
template <class Shape>
FW_DEVICE int before_tile(int stage) {
  static_assert(2 * Shape::kStateBytes <= Shape::kStageBytes);
  return stage + Shape::kStateBytes;
}
// They are on their way: cp_async_wait() and a barrier before they are read.
template <class Shape>
FW_DEVICE void fetch_precond_tiles(const ChannelChunk<Shape>& c, int work_tile, int stage) {
  constexpr int kLanes = Shape::kTileK / 16;
  const Rows keys = c.rows_at(c.args.problem.in.k, work_tile), states = c.rows_before(work_tile);
  const int row = c.thread / kLanes, lane = c.thread % kLanes;
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int column = 8 * (lane + kLanes * i);
    const bool valid = row < c.rows(work_tile) && column < c.args.problem.K;
    const uint32_t at = sw128_offset(row, column);
    cp_async_16(c.base + key_tile<Shape>(stage) + at, valid ? keys.data + 2 * (row * keys.stride + column) : keys.data,
                valid);
    cp_async_16(c.base + before_tile<Shape>(stage) + at,
                valid ? states.data + 2 * (row * states.stride + column) : states.data, valid);
  }
  cp_async_commit();
}

// What dM M'(A), which lies in the factors' memory but for slope_factor(), makes of D = 0: to dk what D adds to it
// without its normalisation, and the sums over the columns of D (.) A before the row and of D (.) k^2. The fragments of
// k are left.
template <class Shape>
FW_DEVICE void add_state_gradients(const ChannelChunk<Shape>& c, int work_tile, int stage, float (&dk)[4][4],
                                   uint32_t (&keys)[2][4], float (&sums)[2][2]) {
  const RowGateArrays<Shape> rows(c);
  const int own = 16 * c.block_row(), first = 32 * c.group();
  const float factor = slope_factor(c.all.precond);
  float d[4][4] = {};
  // What the own 16 rows give each other; before the first of them it goes to those of the blocks before, the same for
  // all of these but for a factor.
  const float from[2] = {rows.log_decay[c.row()], rows.log_decay[c.row() + 8]};
  uint32_t t[4];
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = c.row() + 8 * (i % 2), at = own + 2 * (c.lane & 3) + 8 * (i / 2);
    const float2 to = float2_at(rows.log_decay + at);
    t[i] = pack_bf16(at >= row ? exp2_fast(to.x - from[i % 2]) : 0.0f,
                     at + 1 >= row ? exp2_fast(to.y - from[i % 2]) : 0.0f);
  }
  FW_UNROLL
  for (int j = 0; j < 4; j += 2) {
    uint32_t b[4];
    load_right(b, c.base + Shape::kFactors, own, first + 8 * j, c.lane);
    mma_bf16(d[j], t, b[0], b[1]);
    mma_bf16(d[j + 1], t, b[2], b[3]);
  }
  float* const starts = c.floats(Shape::kBlockStarts) + c.column();
  if (c.lane < 4) {
    const float decay = rows.decay[own];
    FW_UNROLL
    for (int j = 0; j < 4; ++j)
      store_float2(starts + c.block_row() * Shape::kTileK + 8 * j, decay * d[j][0], decay * d[j][1]);
  }
  named_barrier_sync(1 + c.group(), 128);
  FW_NO_UNROLL
  for (int block = c.block_row() + 1; block < 4; ++block) {
    const float to = rows.log_decay[16 * block - 1], low = exp2_fast(to - from[0]), high = exp2_fast(to - from[1]);
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 x = float2_at(starts + block * Shape::kTileK + 8 * j);
      d[j][0] = fmaf(low, x.x, d[j][0]), d[j][1] = fmaf(low, x.y, d[j][1]), d[j][2] = fmaf(high, x.x, d[j][2]),
      d[j][3] = fmaf(high, x.y, d[j][3]);
    }
  }
  uint32_t before[2][4];
  FW_UNROLL
  for (int j = 0; j < 4; j += 2) {
    uint32_t k[4], a[4];
    load_left(k, c.base + key_tile<Shape>(stage), own, first + 8 * j, c.lane);
    load_left(a, c.base + before_tile<Shape>(stage), own, first + 8 * j, c.lane);
    FW_UNROLL
    for (int i = 0; i < 4; ++i) keys[i % 2][j + i / 2] = k[i], before[i % 2][j + i / 2] = a[i];
  }
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float gain = 2.0f * factor * rows.gain[c.row() + 8 * half];
    sums[half][0] = sums[half][1] = 0;
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const auto value = [&](uint32_t word) { return i == 0 ? bf16_low(word) : bf16_high(word); };
        const float k = value(keys[half][j]), of_key = d[j][2 * half + i] * k;
        sums[half][0] = fmaf(d[j][2 * half + i], value(before[half][j]), sums[half][0]);
        sums[half][1] = fmaf(of_key, k, sums[half][1]);
        dk[j][2 * half + i] = fmaf(gain, of_key, dk[j][2 * half + i]);
      }
    }
    sums[half][0] *= factor, sums[half][1] *= factor;
  }
  // Of A before the chunk.
  float* const to = global_memory(c.args.precond.sums) +
                    static_cast<int64_t>(c.tile_index(again<Shape>(work_tile))) * c.args.problem.K + c.column();
  const int limit = c.row() == 0 ? c.args.problem.K : 0;
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (c.column() + 8 * j < limit)
      store_float2(to + 8 * j, factor * rows.decay[0] * d[j][0], factor * rows.decay[0] * d[j][1]);
  }
}

// What dk takes of k of a row for the key's normalisation; with_key: the sum over all columns.
template <class Shape>
FW_DEVICE float of_normalised_key(const ChannelChunk<Shape>& c, int row, float with_key) {
  const RowGateArrays<Shape> rows(c);
  return c.args.problem.rule.k_norm == Norm::kL2 ? -2 * rows.gain[row] * rows.kn2[row] * with_key : 0.0f;
}
// By 64 threads, from that sum and that of D (.) A.
template <class Shape>
FW_DEVICE void store_precond_share(const ChannelChunk<Shape>& c, int work_tile, int row, float with_state,
                                   float with_key) {
  const RowGateArrays<Shape> rows(c);
  const float decay = rows.decay[row], gain = rows.gain[row], kn2 = rows.kn2[row],
              decay_to_end = exp2_fast(rows.log_decay[63] - rows.log_decay[row]);
  char* const out = c.address(work_tile, WorkTile<Shape>::kShare) +
                    row * int64_t{c.args.problem.H} * static_cast<int>(sizeof(PrecondShare::Row));
  *reinterpret_cast<float4*>(out) =
      make_float4(decay_to_end * gain, decay_to_end * kn2, c.args.problem.rule.k_norm == Norm::kL2 ? kn2 : 0.0f, 0);
  *reinterpret_cast<float2*>(out + 16) = make_float2(decay == 0 ? 0.0f : decay * with_state, kn2 * with_key);
}
// By a warp: the product of the decays, and of the sums that warps have left for the center.
template <class Shape>
FW_DEVICE void store_chunk_share(const ChannelChunk<Shape>& c, int work_tile) {
  const PrecondShare& share = c.args.precond;
  const float sum = group_sum<Shape::kWarps>(c.floats(Shape::kOfCenter)[c.lane % Shape::kWarps]);
  if (c.lane == 0)
    global_memory(share.products)[c.tile_index(again<Shape>(work_tile))] =
        exp2_fast(RowGateArrays<Shape>(c).log_decay[63]);
  if (c.lane == 0 && share.center != nullptr) global_memory(share.center)[c.tile_index(again<Shape>(work_tile))] = sum;
}

}  // namespace fw::cuda
