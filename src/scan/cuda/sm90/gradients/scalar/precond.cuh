// The preconditioner inside sm90/gradients/scalar/kernel.cuh: M of a chunk from A before it, and the chunk's share of
// the preconditioner's gradients (PrecondShare): neither M nor its gradient is ever in memory.
//
// The rows and columns of the products are a thread's by the fragments of wgmma; A runs down the rows. So there is a
// second order of threads, of runs: a warp has four neighbouring rows, a lane kTileK / 32 neighbouring channels of
// each. What the products left for the outputs goes from one to the other through tiles of bf16 that are used no more:
// - in place of the scaled rows: what M is a factor of (dw, or dr where the preconditioner is on the read),
// - in place of q (of A and P): the other terms of dk.
#pragma once

#include "scan/cuda/precond/chunk.cuh"
#include "scan/cuda/sm90/gradients/scalar/rows.cuh"

namespace fw::cuda {

inline constexpr int kPrecondRunRows = 4, kPrecondRuns = kChunk / kPrecondRunRows, kStartRows = 16;

// By the warps that make the row scales, a thread a row; w_k: of the rows, the factor that normalises k.
template <class Shape>
FW_DEVICE void publish_precond(const ScalarChunk<Shape>& c, int work_tile, int row, const RowScaleRegs& numbers,
                               float k2) {
  const Problem& x = c.args.problem;
  const PrecondShare& share = c.args.precond;
  const int64_t tile_index = c.tile(work_tile);
  const int rows = c.rows(work_tile);
  float2* const all = c.row_gates(work_tile);
  constexpr int kN = Shape::kTileK / Shape::kProducers;  // channels of a thread: 1 or 2
  const int channel = kN * row;
  float a[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) a[j] = channel + j < x.K ? x.boundaries[tile_index * x.K + channel + j] : 0.0f;
  {
    RunGates own{1, 0, 0, 0};
    if (row < rows) own = run_gates(x.rule, numbers.precond_g, numbers.precond_beta, k2);
    all[row] = make_float2(own.alpha, own.gain);
  }
  sync_loaders();
  if (row < kPrecondRuns) {
    const float4 first = *reinterpret_cast<const float4*>(all + 4 * row),
                 second = *reinterpret_cast<const float4*>(all + 4 * row + 2);
    c.run_scalars(work_tile)[row] = first.x * first.z * (second.x * second.z);
  }
  if (row == kPrecondRuns && x.rule.uses_precond_center())
    c.run_scalars(work_tile)[kPrecondRuns] = x.precond_center[c.hv(work_tile) * x.center_stride];
  // A before rows 16, 32 and 48.
  const int tile = Shape::kRead + c.key_offset(work_tile) + Shape::kStateBytes;
  FW_NO_UNROLL
  for (int t = 0; t < 3 * kStartRows; t += 4) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const char* at = c.memory + tile + sw128_offset(t + i, channel);
      const float2 gates = all[t + i];
      if constexpr (kN == 2) {
        const uint32_t k = *reinterpret_cast<const uint32_t*>(at);
        a[0] = step_precond(gates.x, gates.y, bf16_low(k), a[0]),
        a[1] = step_precond(gates.x, gates.y, bf16_high(k), a[1]);
      } else {
        a[0] = step_precond(gates.x, gates.y, bf16_value(*reinterpret_cast<const uint16_t*>(at)), a[0]);
      }
    }
    if (t % kStartRows != kStartRows - 4) continue;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) c.starts(work_tile)[t / kStartRows * Shape::kTileK + channel + j] = a[j];
  }
  // What the rows take of a gradient after the chunk, by the first warp, two rows a lane.
  if (row >= 32) return;
  const float4 gates = *reinterpret_cast<const float4*>(all + 2 * row);
  float product = gates.x * gates.z;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float after = shuffle_down(product, delta);
    if (row + delta < 32) product *= after;
  }
  float decay_to_end = shuffle_down(product, 1);
  if (row == 31) decay_to_end = 1;
  if (row == 0) share.products[tile_index] = product;
  const float2 w_k = *reinterpret_cast<const float2*>(c.coefficients(work_tile) + ScalarChunk<Shape>::kWk + 2 * row);
  const bool normalised = x.rule.k_norm == Norm::kL2;
  const float before = decay_to_end * gates.z, first_kn2 = w_k.x * w_k.x, second_kn2 = w_k.y * w_k.y;
  PrecondShare::Row* const out = reinterpret_cast<PrecondShare::Row*>(c.addresses(work_tile)[WorkTile<Shape>::kShare]);
  if (2 * row < rows)
    *reinterpret_cast<float4*>(out + int64_t{2 * row} * x.H) =
        make_float4(before * gates.y, before * first_kn2, normalised ? first_kn2 : 0.0f, 0);
  if (2 * row + 1 < rows)
    *reinterpret_cast<float4*>(out + int64_t{2 * row + 1} * x.H) =
        make_float4(decay_to_end * gates.w, decay_to_end * second_kn2, normalised ? second_kn2 : 0.0f, 0);
}
// After the work tile, by a warp.
template <class Shape>
FW_DEVICE void store_center_share(const ScalarChunk<Shape>& c, int work_tile) {
  if (c.args.precond.center == nullptr) return;
  const float sum = group_sum<16>(c.center_sums(work_tile)[c.lane & 15]);
  if (c.lane == 0) c.args.precond.center[c.tile(work_tile)] = sum;
}

// A warp's run, so that the warps of a scheduler have runs at all offsets in their 16 rows, and of all 16 rows.
template <class Shape>
struct PrecondRun {
  static constexpr int kN = Shape::kTileK / 32;
  int first, start, channel;  // row; which 16 rows

  FW_DEVICE explicit PrecondRun(const ScalarChunk<Shape>& c) {
    start = c.warp >> 2;
    first = kStartRows * start + kPrecondRunRows * ((c.warp - start) & 3);
    channel = kN * c.lane;
  }
  // This lane's channels of a row of a tile.
  FW_DEVICE int at(int row) const { return sw128_offset(row, channel); }
};
template <int kN>
FW_DEVICE void load_row(const char* at, float (&x)[kN]) {
  if constexpr (kN == 4) {
    const uint2 y = *reinterpret_cast<const uint2*>(at);
    x[0] = bf16_low(y.x), x[1] = bf16_high(y.x), x[2] = bf16_low(y.y), x[3] = bf16_high(y.y);
  } else {
    const uint32_t y = *reinterpret_cast<const uint32_t*>(at);
    x[0] = bf16_low(y), x[1] = bf16_high(y);
  }
}
template <int kN>
FW_DEVICE void store_row(char* at, const float (&x)[kN]) {
  if constexpr (kN == 4) {
    *reinterpret_cast<uint2*>(at) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  } else {
    *reinterpret_cast<uint32_t*>(at) = pack_bf16(x[0], x[1]);
  }
}

// Where A starts for the run's 16 rows: what is in memory is asked for before it is waited for.
template <class Shape>
FW_DEVICE void load_start(const ScalarChunk<Shape>& c, int work_tile, const PrecondRun<Shape>& run,
                          float (&a)[PrecondRun<Shape>::kN]) {
  const int K = c.args.problem.K;
  FW_UNROLL
  for (int j = 0; j < PrecondRun<Shape>::kN; ++j) a[j] = 0;
  if (run.start > 0 || run.channel >= K) return;
  load_lane(c.args.problem.boundaries, c.tile(work_tile), run.channel, K, a);
}
// A before the run, after load_start().
template <class Shape>
FW_DEVICE void go_to_run(const ScalarChunk<Shape>& c, int work_tile, const PrecondRun<Shape>& run, int k_tile,
                         float (&a)[PrecondRun<Shape>::kN]) {
  constexpr int kN = PrecondRun<Shape>::kN;
  if (run.start > 0)
    load_words<kN>(reinterpret_cast<const char*>(c.starts(work_tile) + (run.start - 1) * Shape::kTileK + run.channel),
                   a);
  FW_NO_UNROLL
  for (int row = kStartRows * run.start; row < run.first; row += kPrecondRunRows) {
    FW_UNROLL
    for (int r = 0; r < kPrecondRunRows; ++r) {
      const float2 gates = c.row_gates(work_tile)[row + r];
      float k[kN];
      load_row(c.memory + k_tile + run.at(row + r), k);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) a[j] = step_precond(gates.x, gates.y, k[j], a[j]);
    }
  }
}
template <class Shape>
FW_DEVICE PrecondMap<float> precond_of(const ScalarChunk<Shape>& c, int work_tile) {
  PrecondMap<float> map = c.all.precond;
  map.squashed = true, map.previous = false;
  if (c.args.problem.rule.uses_precond_center()) map.center = c.run_scalars(work_tile)[kPrecondRuns];
  return map;
}
// The row times M, where w (r) is: into a tile of its own. start: of load_start().
template <class Shape>
FW_DEVICE void scale_rows(const ScalarChunk<Shape>& c, int work_tile, float (&a)[PrecondRun<Shape>::kN]) {
  constexpr int kN = PrecondRun<Shape>::kN;
  const PrecondRun<Shape> run(c);
  const int q_tile = Shape::kRead + c.key_offset(work_tile), k_tile = q_tile + Shape::kStateBytes;
  const bool on_read = c.args.problem.rule.preconditions_read();
  const PrecondMap<float> map = precond_of(c, work_tile);
  go_to_run(c, work_tile, run, k_tile, a);
  FW_UNROLL
  for (int r = 0; r < kPrecondRunRows; ++r) {
    const float2 gates = c.row_gates(work_tile)[run.first + r];
    const int at = run.at(run.first + r);
    float k[kN], y[kN];
    load_row(c.memory + k_tile + at, k);
    load_row(c.memory + (on_read ? q_tile : k_tile) + at, y);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      a[j] = step_precond(gates.x, gates.y, k[j], a[j]);
      y[j] *= PrecondElements<FastMath>::value(map, a[j]);
    }
    store_row(c.memory + Shape::kScaled + at, y);
  }
}

// The warp's fragments into a tile, by way of which they reach the runs.
template <class Shape>
FW_DEVICE void store_fragments(const ScalarChunk<Shape>& c, int tile, const float (&x)[Shape::kKeyTiles][4]) {
  FW_UNROLL
  for (int j = 0; j < Shape::kKeyTiles / 2; ++j) {
    const float part[2][4] = {{x[2 * j][0], x[2 * j][1], x[2 * j][2], x[2 * j][3]},
                              {x[2 * j + 1][0], x[2 * j + 1][1], x[2 * j + 1][2], x[2 * j + 1][3]}};
    store_words(down_then_right(c.base + tile, 16 * c.block_row(), c.key_column() + 16 * j, c.lane), part);
  }
}
// The tile in which the other terms of dk wait.
template <class Shape>
FW_DEVICE int lo_tile(int q_tile, bool on_read) {
  return on_read ? Shape::kP : q_tile;
}

// From the fragments: what the runs need, and dq where M is not in it.
template <class Shape>
FW_DEVICE void leave_for_runs(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& d,
                              const KeySlopes& slopes) {
  const int q_tile = Shape::kRead + c.key_offset(work_tile), k_tile = q_tile + Shape::kStateBytes;
  const bool on_read = c.args.problem.rule.preconditions_read();
  const KeyWords<Shape> q(c, q_tile), k(c, k_tile);
  if (on_read) {
    store_fragments(c, Shape::kScaled, d.r);
    float* const of_q = c.coefficients(work_tile) + ScalarChunk<Shape>::kZv;  // used no more
    if (c.group() == 0 && (c.lane & 3) == 0) of_q[c.row()] = slopes.q[0], of_q[c.row() + 8] = slopes.q[1];
  } else {
    store_fragments(c, Shape::kScaled, d.w);
  }
  FW_UNROLL
  for (int j = 0; j < Shape::kKeyTiles; ++j) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      float term = slopes.k[i / 2] * k.at(j, i);
      if (Shape::kDelta) term += d.e[j][i];
      d.w[j][i] = on_read ? d.w[j][i] + term : term;
      d.r[j][i] += slopes.q[i / 2] * q.at(j, i);
    }
  }
  store_fragments(c, lo_tile<Shape>(q_tile, on_read), d.w);
  if (on_read) return;
  const Rows dq = c.rows_at(c.args.grads.d.q, work_tile);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    store_key_row(c, dq, c.pieces(kVec16DQ), row, row < c.rows(work_tile), d.r, half);
  }
}

template <class Shape>
FW_DEVICE void store_run_row(const ScalarChunk<Shape>& c, const Rows& out, bool wide, int row, int channel,
                             int work_tile, const float (&x)[PrecondRun<Shape>::kN]) {
  const int K = c.args.problem.K;
  if (row >= c.rows(work_tile) || channel >= K) return;
  if (wide) {
    store_row(out.data + 2 * (row * out.stride + channel), x);
  } else if (out.data != nullptr) {
    store_channels(out, row, channel, K, x);
  }
}

// The runs: dk (and dq where M is in it) and the chunk's share, D = 0 after the chunk. With two barriers of the
// computing warps.
template <class Shape>
FW_DEVICE void store_precond_gradients(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& sums,
                                       const KeySlopes& slopes) {
  constexpr int kN = PrecondRun<Shape>::kN, kRows = kPrecondRunRows;
  leave_for_runs(c, work_tile, sums, slopes);
  const Problem& x = c.args.problem;
  const PrecondRun<Shape> run(c);
  float a[kN];
  load_start(c, work_tile, run, a);
  sync_consumers();

  const int q_tile = Shape::kRead + c.key_offset(work_tile), k_tile = q_tile + Shape::kStateBytes;
  const bool on_read = x.rule.preconditions_read();
  const PrecondMap<float> map = precond_of(c, work_tile);
  go_to_run(c, work_tile, run, k_tile, a);
  // da: what M says about A; before: A before the token.
  float k[kRows][kN], dk[kRows][kN], da[kRows][kN], before[kRows][kN], center = 0;
  const Rows dq = c.rows_at(c.args.grads.d.q, work_tile);
  FW_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int row = run.first + r, at = run.at(row);
    const float2 gates = c.row_gates(work_tile)[row];
    float y[kN], raw[kN];
    load_row(c.memory + k_tile + at, k[r]);
    load_row(c.memory + Shape::kScaled + at, y);
    load_row(c.memory + lo_tile<Shape>(q_tile, on_read) + at, dk[r]);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) raw[j] = k[r][j];
    if (on_read) load_row(c.memory + q_tile + at, raw);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      before[r][j] = a[j];
      a[j] = step_precond(gates.x, gates.y, k[r][j], a[j]);
      const PrecondPoint p = precond_point(map, a[j]);
      const float dm = y[j] * raw[j];
      da[r][j] = dm * p.of_state;
      center -= dm * p.of_raw;
      y[j] *= p.m;
      if (!on_read) dk[r][j] += y[j];
    }
    if (on_read) {
      const float slope = c.coefficients(work_tile)[ScalarChunk<Shape>::kZv + row];
      FW_UNROLL
      for (int j = 0; j < kN; ++j) y[j] += slope * raw[j];
      store_run_row(c, dq, c.pieces(kVec16DQ), row, run.channel, work_tile, y);
    }
  }
  center = warp_sum(center);
  if (c.lane == 0) c.center_sums(work_tile)[c.warp] = center;
  // What the run makes of D = 0 after it, in place of the thread's own numbers of q: all of them have been read.
  float d[kN] = {};
  FW_UNROLL
  for (int r = kRows - 1; r >= 0; --r) {
    const float alpha = c.row_gates(work_tile)[run.first + r].x;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d[j] = alpha * (d[j] + da[r][j]);
  }
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    char* const to = c.memory + q_tile + run.at(run.first + i);
    if constexpr (kN == 4) {
      *reinterpret_cast<float2*>(to) = make_float2(d[2 * i], d[2 * i + 1]);
    } else {
      *reinterpret_cast<float*>(to) = d[i];
    }
  }
  sync_consumers();

  FW_UNROLL
  for (int j = 0; j < kN; ++j) d[j] = 0;
  FW_NO_UNROLL
  for (int row = kChunk - kRows; row > run.first; row -= kRows) {
    const float product = c.run_scalars(work_tile)[row / kRows];
    const char *first = c.memory + q_tile + run.at(row), *second = c.memory + q_tile + run.at(row + 1);
    float more[kN];
    if constexpr (kN == 4) {
      const float2 low = *reinterpret_cast<const float2*>(first), high = *reinterpret_cast<const float2*>(second);
      more[0] = low.x, more[1] = low.y, more[2] = high.x, more[3] = high.y;
    } else {
      more[0] = *reinterpret_cast<const float*>(first), more[1] = *reinterpret_cast<const float*>(second);
    }
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d[j] = fmaf(product, d[j], more[j]);
  }
  float row_sums[2 * kRows];  // D.A before the token, D.k^2
  FW_UNROLL
  for (int r = kRows - 1; r >= 0; --r) {
    const float2 gates = c.row_gates(work_tile)[run.first + r];
    float with_state = 0, with_key = 0;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      const float here = d[j] + da[r][j], of_key = here * k[r][j];
      with_state = fmaf(here, before[r][j], with_state);
      with_key = fmaf(of_key, k[r][j], with_key);
      dk[r][j] = fmaf(2 * gates.y, of_key, dk[r][j]);
      d[j] = gates.x * here;
    }
    row_sums[r] = with_state, row_sums[kRows + r] = with_key;
  }
  if (run.first == 0) store_lane(c.args.precond.sums, c.tile(work_tile), run.channel, x.K, d);
  // Lanes 4 i on have number i.
  const float total = scattered_sum<2 * kRows>(row_sums, c.lane);
  const int own = run.first + (c.lane >> 2) % kRows;
  const float2 own_gates = c.row_gates(work_tile)[own];
  const float kn = c.coefficients(work_tile)[ScalarChunk<Shape>::kWk + own], kn2 = kn * kn;
  if ((c.lane & 3) == 0 && own < c.rows(work_tile)) {
    PrecondShare::Row* const out =
        reinterpret_cast<PrecondShare::Row*>(c.addresses(work_tile)[WorkTile<Shape>::kShare]) + int64_t{own} * x.H;
    if (c.lane < 16) {
      out->dg = own_gates.x == 0 ? 0.0f : own_gates.x * total;
    } else {
      out->dbeta = kn2 * total;
    }
  }
  const float common = x.rule.k_norm == Norm::kL2 ? -2 * own_gates.y * kn2 * total : 0.0f;
  const Rows out = c.rows_at(c.args.grads.d.k, work_tile);
  FW_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float slope = shuffle(common, 16 + 4 * r);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) dk[r][j] = fmaf(slope, k[r][j], dk[r][j]);
    store_run_row(c, out, c.pieces(kVec16DK), run.first + r, run.channel, work_tile, dk[r]);
  }
}

}  // namespace fw::cuda
