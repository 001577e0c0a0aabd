// The turns of a Mamba-3 layer on the device (ops/cpu/mamba3_rotary.cpp has the formulas). The angles of a head are
// sums over tokens of its dt times tanh(angle). Chunks of kRotaryChunk tokens are summed first, in double. A scan over
// a sequence's chunks leaves the turns before each (the checkpoints). Whoever wants a token's begins at its chunk's
// mark. Turns themselves are nowhere: they would be as large as the rows. A thread has a pair of channels of a head
// over the tokens of a chunk. Backward has all heads of a group in a block, so that what they share (queries, keys,
// angles) is summed in registers. The sum over the tokens after a token is that of its chunk and those after, a second
// scan, less what the chunk has before the token, so that its two parts need not meet:
//   dTheta_t = I_chunk - E_t        E_t = sum of dtheta over the chunk's tokens before t
// A scalar product of rows is not changed by a turn, so products of a token's own rows and dtheta are made of rows that
// are not turned.
#include <cmath>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/halving.cuh"
#include "ops/cuda/mamba3_rotary.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kSpan = static_cast<int>(kRotaryChunk);
constexpr int kThreads = 256;
constexpr unsigned kMostRuns = 16;  // of a sequence's chunks, in a scan over them
constexpr float kPi = 3.14159265358979f;

// ---- the angles ------------------------------------------------------------------------------------------------------------------------------------------

template <class T>
struct AngleArgs {
  Mat<const T> angle, dt;
  RotaryOffsets offsets;
  int heads, angles;
  bool own;        // angles of every head
  float* tanhs;    // [T, columns of angle]
  double* totals;  // [checkpoints, H NA], or null: not wanted
};

// A block has a chunk: tanh of its angles, once for heads that share them, and the sums of a head's turns.
template <class T>
__global__ void __launch_bounds__(kThreads) angles_kernel(const AngleArgs<T> a) {
  follow();
  double* const shared = reinterpret_cast<double*>(shared_memory());  // [kSpan, NA] where they are shared
  const RotaryOffsets::Chunk chunk = a.offsets.chunk(block_index_x());
  if (chunk.count <= 0) return;
  const int thread = static_cast<int>(thread_index()), columns = a.own ? a.heads * a.angles : a.angles,
            all = a.heads * a.angles;
  const auto tanh_at = [&](int t, int c) {
    const double value = tanh(static_cast<double>(number(a.angle.data[(chunk.begin + t) * a.angle.stride + c])));
    a.tanhs[(chunk.begin + t) * columns + c] = static_cast<float>(value);
    return value;
  };
  const auto half_step = [&](int t, int h) {
    return 0.5 * static_cast<double>(number(a.dt.data[(chunk.begin + t) * a.dt.stride + h]));
  };
  if (!a.own) {
    for (int i = thread; i < chunk.count * a.angles; i += kThreads) shared[i] = tanh_at(i / a.angles, i % a.angles);
    sync_threads();
  }
  if (!a.own && a.totals == nullptr) return;
  for (int c = thread; c < all; c += kThreads) {
    const int h = c / a.angles;
    double sum = 0;
    for (int t = 0; t < chunk.count; ++t)
      sum += (a.own ? tanh_at(t, c) : shared[t * a.angles + c - h * a.angles]) * half_step(t, h);
    if (a.totals != nullptr) a.totals[int64_t{block_index_x()} * all + c] = sum;
  }
}

// ---- scans over chunks -----------------------------------------------------------------------------------------------------------------------------------

// Columns [checkpoints, cols] of sums of chunks. Lanes have columns, warps runs of a sequence's chunks.
struct ScanForward {  // turns before every chunk
  const double* totals;
  float *start, *checkpoints;  // [sequences, 2, cols] or null; [checkpoints, 2, cols]
};
struct ScanBackward {     // what a chunk and those after it sum to
  const float* totals;    // [parts, checkpoints, cols]
  float *behind, *start;  // [checkpoints, cols]; [sequences, cols] or null
  int parts;
  int64_t checkpoints;
};

FW_DEVICE double value_of(const ScanForward& a, int64_t mark, int64_t cols, int64_t c) {
  return a.totals[mark * cols + c];
}
FW_DEVICE double value_of(const ScanBackward& a, int64_t mark, int64_t cols, int64_t c) {
  double sum = 0;
  for (int part = 0; part < a.parts; ++part)
    sum += static_cast<double>(a.totals[(part * a.checkpoints + mark) * cols + c]);
  return sum;
}
FW_DEVICE double before_all(const ScanForward& a, int64_t n, int64_t cols, int64_t c) {
  if (a.start == nullptr) return 0;
  return static_cast<double>(a.start[2 * n * cols + c]) + static_cast<double>(a.start[(2 * n + 1) * cols + c]);
}
FW_DEVICE double before_all(const ScanBackward&, int64_t, int64_t, int64_t) { return 0; }
FW_DEVICE void store_two(float* to, int64_t cols, double rotations) {
  const double fraction = rotations - rint(rotations);
  const float high = static_cast<float>(fraction);
  to[0] = high;
  to[cols] = static_cast<float>(fraction - static_cast<double>(high));
}
// before, after: what the chunks in front (of a backward scan: after) sum to without the chunk, and with it.
FW_DEVICE void store(const ScanForward& a, int64_t mark, int64_t cols, int64_t c, double before, double /*after*/) {
  store_two(a.checkpoints + 2 * mark * cols + c, cols, before);
}
FW_DEVICE void store(const ScanBackward& a, int64_t mark, int64_t cols, int64_t c, double /*before*/, double after) {
  a.behind[mark * cols + c] = static_cast<float>(after);
}
FW_DEVICE void store_end(const ScanForward& a, int64_t n, int64_t cols, int64_t c, double all) {
  if (a.start != nullptr) store_two(a.start + 2 * n * cols + c, cols, all);
}
FW_DEVICE void store_end(const ScanBackward& a, int64_t n, int64_t cols, int64_t c, double all) {
  if (a.start != nullptr) a.start[n * cols + c] = static_cast<float>(all);
}

template <bool kBack, class Scan>
__global__ void __launch_bounds__(32 * kMostRuns)
    scan_chunks_kernel(const Scan a, const RotaryOffsets offsets, int64_t cols) {
  follow();
  constexpr int kAhead = 8;
  double* const sums = reinterpret_cast<double*>(shared_memory());  // [runs, 32]
  const int lane = static_cast<int>(lane_index()), run = static_cast<int>(warp_index()),
            runs = static_cast<int>(block_size() / 32);
  const int64_t n = block_index_x(), c = int64_t{block_index_y()} * 32 + lane, first = offsets.first_mark(n),
                count = offsets.chunks(n);
  const int64_t of_run = (count + runs - 1) / runs, begin = min(count, run * of_run), end = min(count, begin + of_run);
  const auto mark = [&](int64_t i) { return first + (kBack ? count - 1 - i : i); };
  const bool active = c < cols;
  // body(chunk, its sum) over the run's chunks, several of which are asked for at a time.
  const auto for_chunks = [&](const auto& body) {
    for (int64_t from = begin; from < end; from += kAhead) {
      double values[kAhead];
      FW_UNROLL for (int i = 0; i < kAhead; ++i) values[i] =
          from + i < end ? value_of(a, mark(from + i), cols, c) : 0.0;
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (from + i < end) body(mark(from + i), values[i]);
      }
    }
  };
  double sum = 0;
  if (active && runs > 1) for_chunks([&](int64_t, double value) { sum += value; });
  sums[run * 32 + lane] = sum;
  sync_threads();
  if (!active) return;
  double before = before_all(a, n, cols, c);
  for (int i = 0; i < run; ++i) before += sums[i * 32 + lane];
  for_chunks([&](int64_t at, double value) {
    store(a, at, cols, c, before, before + value);
    before += value;
  });
  if (run == runs - 1) store_end(a, n, cols, c, before);
}

template <bool kBack, class Scan>
void scan_chunks(const Scan& scan, const PassLayout& layout, int64_t cols, int64_t rows, void* stream) {
  int64_t most = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n)
    most = std::max(most, parts_of(layout.host.length(n), kRotaryChunk));
  unsigned runs = 1;
  while (runs < kMostRuns && static_cast<int64_t>(runs) * 8 < most) runs *= 2;
  launch_following(rows, scan_chunks_kernel<kBack, Scan>,
                   Dim3{static_cast<unsigned>(layout.host.count()), static_cast<unsigned>(parts_of(cols, 32))},
                   32 * runs, sizeof(double) * 32 * runs, stream, scan, RotaryOffsets(layout), cols);
}

// ---- the rows --------------------------------------------------------------------------------------------------------------------------------------------

// How pairs of channels lie over threads: `lanes` neighbouring ones have a head's (or a tile of them).
struct PairShape {
  int heads, groups, state, rank, angles, pairs, lanes, tiles;
  bool rotate_half, own;

  PairShape(const Mamba3Shape& s, bool own_angles)
      : heads(static_cast<int>(s.heads)),
        groups(static_cast<int>(s.groups)),
        state(static_cast<int>(s.state)),
        rank(static_cast<int>(s.rank)),
        angles(static_cast<int>(s.angles)),
        pairs((state + 1) / 2),
        lanes(std::min(kThreads, (pairs + 31) / 32 * 32)),
        tiles((pairs + lanes - 1) / lanes),
        rotate_half(s.rotate_half),
        own(own_angles) {}
  int at_once() const { return kThreads / lanes; }  // heads, or chunks, of a block
};

struct Channels {
  int first, second;
  bool both;
  FW_DEVICE Channels(const PairShape& s, int pair)
      : first(s.rotate_half ? pair : 2 * pair),
        second(s.rotate_half ? pair + s.state / 2 : 2 * pair + 1),
        both(second < s.state) {}
};

// The two channels of a row, as they are stored until they are used; adjacent ones that lie at a multiple of both are
// one access.
template <class T, bool kAdjacent>
struct RowPair {
  using Raw = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;

  FW_DEVICE static Raw load(const T* row, const Channels& c) {
    if constexpr (kAdjacent) {
      return *reinterpret_cast<const Raw*>(row + c.first);
    } else if constexpr (sizeof(T) == 4) {
      return make_float2(row[c.first], c.both ? row[c.second] : 0.0f);
    } else {
      return row[c.first].bits | (c.both ? static_cast<uint32_t>(row[c.second].bits) << 16 : 0u);
    }
  }
  FW_DEVICE static float2 numbers(Raw raw) {
    if constexpr (sizeof(T) == 4) {
      return raw;
    } else {
      return make_float2(bf16_low(raw), bf16_high(raw));
    }
  }
  FW_DEVICE static void store(T* row, const Channels& c, float x, float y) {
    if constexpr (kAdjacent && sizeof(T) == 4) {
      *reinterpret_cast<float2*>(row + c.first) = make_float2(x, y);
    } else if constexpr (kAdjacent) {
      *reinterpret_cast<uint32_t*>(row + c.first) = pack_bf16(x, y);
    } else {
      row[c.first] = stored<T>(x);
      if (c.both) row[c.second] = stored<T>(y);
    }
  }
};
template <class T>
bool adjacent_pairs(const Mamba3Shape& shape, std::initializer_list<Mat<T>> matrices) {
  if (shape.rotate_half || shape.state % 2 != 0) return false;
  for (const Mat<T>& m : matrices) {
    if (reinterpret_cast<uintptr_t>(m.data) % (2 * sizeof(T)) != 0 || m.stride % 2 != 0) return false;
  }
  return true;
}

template <class T>
struct RowArgs {
  PairShape shape;
  RotaryOffsets offsets;
  Mat<const T> q, k, dt;
  const float *q_bias, *k_bias, *tanhs, *checkpoints;

  FW_DEVICE double turns_before(int64_t mark, int head, int pair) const {
    const int64_t all = int64_t{shape.heads} * shape.angles;
    const float* at = checkpoints + 2 * mark * all + int64_t{head} * shape.angles + pair;
    return static_cast<double>(at[0]) + static_cast<double>(at[all]);
  }
  FW_DEVICE int tanh_columns() const { return shape.own ? shape.heads * shape.angles : shape.angles; }
  FW_DEVICE const float* tanh_at(int64_t t, int head, int pair) const {
    return tanhs + t * tanh_columns() + (shape.own ? head * shape.angles : 0) + min(pair, shape.angles - 1);
  }
  FW_DEVICE float dt_at(int64_t t, int head) const { return number(dt.data[t * dt.stride + head]); }
  FW_DEVICE int column(int head, int row) const {
    return (row * shape.groups + head / (shape.heads / shape.groups)) * shape.state;
  }
  FW_DEVICE const float* bias(const float* of, int head, int row) const {
    return of + (int64_t{head} * shape.rank + row) * shape.state;
  }
};
FW_DEVICE float2 bias_pair(const float* bias, const Channels& c) {
  return make_float2(bias[c.first], c.both ? bias[c.second] : 0.0f);
}
FW_DEVICE float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

template <class T>
struct ForwardArgs {
  Mat<T> q_rows, k_rows;
  Mat<float> qk_self;  // with kOneRow
};

// kOneRow: R = 1, and a head in one tile of threads: the product of its rows is made here. Threads without channels of
// their own, and tokens after the chunk, read what others have, so that no branch stands between the loads.
template <class T, bool kAdjacent, bool kOneRow>
__global__ void __launch_bounds__(kThreads) rotary_forward_kernel(const RowArgs<T> a, const ForwardArgs<T> to) {
  follow();
  constexpr int kAhead = 8;
  using Pair = RowPair<T, kAdjacent>;
  const PairShape& s = a.shape;
  float* const products = reinterpret_cast<float*>(shared_memory());  // [kSpan, warps]
  const RotaryOffsets::Chunk chunk = a.offsets.chunk(block_index_x());
  if (chunk.count <= 0) return;
  const int thread = static_cast<int>(thread_index()), of_block = thread / s.lanes, in_block = kThreads / s.lanes;
  const int first_head = static_cast<int>(block_index_y()) * in_block, head = min(first_head + of_block, s.heads - 1);
  const int pair = static_cast<int>(block_index_z()) * s.lanes + thread % s.lanes,
            warps = static_cast<int>(block_size() / 32);
  const bool active = first_head + of_block < s.heads && pair < s.pairs, rotated = pair < s.angles;
  const Channels channels(s, min(pair, s.pairs - 1));
  const float* const tanhs = a.tanh_at(chunk.begin, head, pair);
  const T *const dts = a.dt.data + chunk.begin * a.dt.stride + head,
                 *const q_token = a.q.data + chunk.begin * a.q.stride,
                 *const k_token = a.k.data + chunk.begin * a.k.stride;
  const int tanh_stride = a.tanh_columns(), dt_stride = static_cast<int>(a.dt.stride),
            q_stride = static_cast<int>(a.q.stride), k_stride = static_cast<int>(a.k.stride),
            rank = kOneRow ? 1 : s.rank;
  double rotations = rotated ? a.turns_before(block_index_x(), head, pair) : 0.0;
  const auto pass = [&]<bool kTurns>() {  // kTurns: the warp has pairs that are turned
    for (int from = 0; from < chunk.count; from += kAhead) {
      const auto clamped = [&](int i) { return min(from + i, chunk.count - 1); };
      float2 circle[kAhead];
      if constexpr (kTurns) {
        float half[kAhead];
        FW_UNROLL for (int i = 0; i < kAhead; ++i) half[i] =
            0.5f * tanhs[clamped(i) * tanh_stride] * number(dts[clamped(i) * dt_stride]);
        FW_UNROLL for (int i = 0; i < kAhead; ++i) {
          rotations += static_cast<double>(rotated && from + i < chunk.count ? half[i] : 0.0f);
          circle[i] = circle_of(static_cast<float>(rotations - rint(rotations)));
        }
      }
      for (int row = 0; row < rank; ++row) {
        typename Pair::Raw q[kAhead], k[kAhead];
        const int column = a.column(head, row);
        FW_UNROLL for (int i = 0; i < kAhead; ++i) {
          q[i] = Pair::load(q_token + clamped(i) * q_stride + column, channels);
          k[i] = Pair::load(k_token + clamped(i) * k_stride + column, channels);
        }
        const float2 q_bias = bias_pair(a.bias(a.q_bias, head, row), channels),
                     k_bias = bias_pair(a.bias(a.k_bias, head, row), channels);
        T* const q_to = to.q_rows.data + (chunk.begin * rank + row) * to.q_rows.stride + head * s.state;
        T* const k_to = to.k_rows.data + (chunk.begin * rank + row) * to.k_rows.stride + head * s.state;
        const int q_step = rank * static_cast<int>(to.q_rows.stride),
                  k_step = rank * static_cast<int>(to.k_rows.stride);
        float product[kAhead];
        FW_UNROLL for (int i = 0; i < kAhead; ++i) {
          const float2 x = plus(Pair::numbers(q[i]), q_bias), y = plus(Pair::numbers(k[i]), k_bias);
          product[i] = active ? x.x * y.x + x.y * y.y : 0.0f;
          if (!active || from + i >= chunk.count) continue;
          const auto rotation = [&](float2 z, T* at) {
            if constexpr (kTurns) {
              Pair::store(at, channels, z.x * circle[i].x - z.y * circle[i].y, z.x * circle[i].y + z.y * circle[i].x);
            } else {
              Pair::store(at, channels, z.x, z.y);
            }
          };
          rotation(x, q_to + (from + i) * q_step);
          rotation(y, k_to + (from + i) * k_step);
        }
        if constexpr (kOneRow) {
          const float sum = sums_by_halving(product);  // of number lane / 4
          const int lane = static_cast<int>(lane_index());
          if (lane % 4 == 0) products[(from + lane / 4) * warps + static_cast<int>(warp_index())] = sum;
        }
      }
    }
  };
  if (pair / 32 * 32 < s.angles) {
    pass.template operator()<true>();
  } else {
    pass.template operator()<false>();
  }
  if constexpr (kOneRow) {
    sync_threads();
    const int of_head = s.lanes / 32;
    for (int i = thread; i < chunk.count * in_block; i += static_cast<int>(block_size())) {
      const int t = i / in_block, h = first_head + i % in_block;
      if (h >= s.heads) continue;
      float sum = 0;
      for (int w = 0; w < of_head; ++w) sum += products[t * warps + i % in_block * of_head + w];
      to.qk_self.data[(chunk.begin + t) * to.qk_self.stride + h] = sum;
    }
  }
}

// Products of a token's own rows where there are several, a warp a token and head.
template <class T>
__global__ void __launch_bounds__(kThreads) qk_self_kernel(const RowArgs<T> a, Mat<float> qk_self) {
  follow();
  const PairShape& s = a.shape;
  const int lane = static_cast<int>(lane_index());
  const int64_t item = int64_t{block_index_x()} * (kThreads / 32) + warp_index(), t = item / s.heads;
  const int head = static_cast<int>(item % s.heads);
  if (t >= qk_self.rows) return;
  for (int i = 0; i < s.rank; ++i) {
    for (int j = 0; j < s.rank; ++j) {
      const T *q = a.q.data + t * a.q.stride + a.column(head, i), *k = a.k.data + t * a.k.stride + a.column(head, j);
      float sum = 0;
      for (int n = lane; n < s.state; n += 32)
        sum += (number(q[n]) + a.bias(a.q_bias, head, i)[n]) * (number(k[n]) + a.bias(a.k_bias, head, j)[n]);
      sum = warp_sum(sum);
      if (lane == 0) qk_self.data[t * qk_self.stride + (head * s.rank + i) * s.rank + j] = sum;
    }
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------------------------------------------

template <class T>
struct BackwardArgs {
  Mat<const T> dq_rows, dk_rows;
  Mat<const float> dqk_self;
  Mat<T> dq, dk;
  float *of_q_bias, *of_k_bias;  // [blocks of chunks, H R N]
  float* totals;                 // [R tiles, checkpoints, H NA]
  float* of_dt;                  // [R warps, T, H]
  float* of_angle;               // [G R, T, NA], or with angles of every head [R, T, H NA]
  int64_t tokens, checkpoints;
};

// A block has the heads of a group, a row of a token, and some chunks side by side. As above no branch stands between
// the loads.
template <class T, bool kAdjacent, bool kOneRow>
__global__ void __launch_bounds__(kThreads) rotary_backward_kernel(const RowArgs<T> a, const BackwardArgs<T> g) {
  constexpr int kAhead = 8;
  using Pair = RowPair<T, kAdjacent>;
  const PairShape& s = a.shape;
  float4* const shared = reinterpret_cast<float4*>(shared_memory());  // [2, chunks of the block, lanes]: of the biases
  const int thread = static_cast<int>(thread_index()), chunk_of_block = thread / s.lanes,
            lane_of_head = thread % s.lanes, chunks = kThreads / s.lanes;
  const int rank = kOneRow ? 1 : s.rank, group = static_cast<int>(block_index_y()) / rank,
            row = static_cast<int>(block_index_y()) % rank;
  const int pair = static_cast<int>(block_index_z()) * s.lanes + lane_of_head, heads = s.heads / s.groups,
            all = s.heads * s.angles;
  const int64_t mark = int64_t{block_index_x()} * chunks + chunk_of_block;
  RotaryOffsets::Chunk chunk = mark < g.checkpoints ? a.offsets.chunk(mark) : RotaryOffsets::Chunk{};
  if (chunk.count <= 0) chunk = {};
  const bool active = pair < s.pairs && chunk.count > 0, rotated = active && pair < s.angles;
  const Channels channels(s, min(pair, s.pairs - 1));
  const int angle_warps = (s.angles + 31) / 32, warp_of_pair = pair / 32;
  const int tanh_stride = a.tanh_columns(), dt_stride = static_cast<int>(a.dt.stride),
            q_stride = static_cast<int>(a.q.stride), k_stride = static_cast<int>(a.k.stride),
            dq_step = rank * static_cast<int>(g.dq_rows.stride), dk_step = rank * static_cast<int>(g.dk_rows.stride),
            dqk_self_stride = static_cast<int>(g.dqk_self.stride);
  const T *const q_token = a.q.data + chunk.begin * a.q.stride, *const k_token = a.k.data + chunk.begin * a.k.stride;
  float2 of_q[kSpan] = {}, of_k[kSpan] = {};
  float of_angle[kSpan] = {};
  for (int head = group * heads; head < (group + 1) * heads; ++head) {
    float2 sum_q = {}, sum_k = {};
    float before = 0, of_dt[kSpan] = {};  // E
    const float2 q_bias = bias_pair(a.bias(a.q_bias, head, row), channels),
                 k_bias = bias_pair(a.bias(a.k_bias, head, row), channels);
    double rotations = rotated ? a.turns_before(mark, head, pair) : 0.0;
    const float *const tanhs = a.tanh_at(chunk.begin, head, pair), *const dqk_selfs = g.dqk_self.data +
                                                                                      chunk.begin * g.dqk_self.stride +
                                                                                      head * rank * rank;
    const T *const dts = a.dt.data + chunk.begin * a.dt.stride + head, *const q_at = q_token + a.column(head, row),
                   *const k_at = k_token + a.column(head, row);
    const T* const dq_at = g.dq_rows.data + (chunk.begin * rank + row) * g.dq_rows.stride + head * s.state;
    const T* const dk_at = g.dk_rows.data + (chunk.begin * rank + row) * g.dk_rows.stride + head * s.state;
    const auto pass = [&]<bool kTurns>() {  // kTurns: the warp has pairs that are turned
      FW_UNROLL for (int from = 0; from < kSpan; from += kAhead) {
        const auto clamped = [&](int i) { return max(0, min(from + i, chunk.count - 1)); };
        typename Pair::Raw raw_dq[kAhead], raw_dk[kAhead], raw_q[kAhead], raw_k[kAhead];
        [[maybe_unused]] float tanh_here[kAhead], dt[kAhead], dqk_self[kAhead];  // by kTurns and kOneRow
        FW_UNROLL for (int i = 0; i < kAhead; ++i) {
          raw_dq[i] = Pair::load(dq_at + clamped(i) * dq_step, channels);
          raw_dk[i] = Pair::load(dk_at + clamped(i) * dk_step, channels);
          raw_q[i] = Pair::load(q_at + clamped(i) * q_stride, channels);
          raw_k[i] = Pair::load(k_at + clamped(i) * k_stride, channels);
          if constexpr (kTurns)
            tanh_here[i] = tanhs[clamped(i) * tanh_stride], dt[i] = number(dts[clamped(i) * dt_stride]);
          if constexpr (kOneRow) dqk_self[i] = dqk_selfs[clamped(i) * dqk_self_stride];
        }
        FW_UNROLL for (int i = 0; i < kAhead; ++i) {
          const int t = from + i;
          const bool there = active && t < chunk.count;
          const float mask = there ? 1.0f : 0.0f;
          const float2 dq = Pair::numbers(raw_dq[i]), dk = Pair::numbers(raw_dk[i]);
          const float2 q = plus(Pair::numbers(raw_q[i]), q_bias), k = plus(Pair::numbers(raw_k[i]), k_bias);
          float2 bq = dq, bk = dk;
          if constexpr (kTurns) {
            rotations += static_cast<double>(rotated && there ? 0.5f * tanh_here[i] * dt[i] : 0.0f);
            const float2 circle = circle_of(static_cast<float>(rotations - rint(rotations)));
            bq = make_float2(dq.x * circle.x + dq.y * circle.y, dq.y * circle.x - dq.x * circle.y);
            bk = make_float2(dk.x * circle.x + dk.y * circle.y, dk.y * circle.x - dk.x * circle.y);
            const float kept = rotated && there ? 1.0f : 0.0f;
            of_dt[t] = -kept * tanh_here[i] * before;
            if (s.own) {
              if (rotated && there)
                g.of_angle[(row * g.tokens + chunk.begin + t) * all + head * s.angles + pair] =
                    -dt[i] * (1.0f - tanh_here[i] * tanh_here[i]) * before;
            } else {
              of_angle[t] -= dt[i] * before;
            }
            before += kept * (bq.y * q.x - bq.x * q.y + bk.y * k.x - bk.x * k.y);
          }
          if constexpr (kOneRow) {
            bq = make_float2(bq.x + dqk_self[i] * k.x, bq.y + dqk_self[i] * k.y);
            bk = make_float2(bk.x + dqk_self[i] * q.x, bk.y + dqk_self[i] * q.y);
          } else {
            const float* const weights = dqk_selfs + clamped(i) * dqk_self_stride;
            for (int j = 0; j < rank; ++j) {
              const T *const other_k = k_token + clamped(i) * k_stride + a.column(head, j), *const other_q =
                                                                                                q_token +
                                                                                                clamped(i) * q_stride +
                                                                                                a.column(head, j);
              const float2 x =
                  plus(Pair::numbers(Pair::load(other_k, channels)), bias_pair(a.bias(a.k_bias, head, j), channels));
              const float2 y =
                  plus(Pair::numbers(Pair::load(other_q, channels)), bias_pair(a.bias(a.q_bias, head, j), channels));
              const float of_x = weights[row * rank + j], of_y = weights[j * rank + row];
              bq = make_float2(bq.x + of_x * x.x, bq.y + of_x * x.y);
              bk = make_float2(bk.x + of_y * y.x, bk.y + of_y * y.y);
            }
          }
          bq = make_float2(mask * bq.x, mask * bq.y), bk = make_float2(mask * bk.x, mask * bk.y);
          of_q[t] = plus(of_q[t], bq), of_k[t] = plus(of_k[t], bk);
          sum_q = plus(sum_q, bq), sum_k = plus(sum_k, bk);
        }
      }
    };
    if (warp_of_pair < angle_warps) {
      pass.template operator()<true>();
      if (rotated) g.totals[(row * g.checkpoints + mark) * all + head * s.angles + pair] = before;
      const float sum = sums_by_halving(of_dt);  // of token lane / 2
      const int t = static_cast<int>(lane_index()) / 2;
      if (lane_index() % 2 == 0 && t < chunk.count)
        g.of_dt[((row * angle_warps + warp_of_pair) * g.tokens + chunk.begin + t) * s.heads + head] = sum;
    } else {
      pass.template operator()<false>();
    }
    float4* const rotation = shared + (head & 1) * chunks * s.lanes;
    rotation[chunk_of_block * s.lanes + lane_of_head] = make_float4(sum_q.x, sum_q.y, sum_k.x, sum_k.y);
    sync_threads();
    if (chunk_of_block == 0 && pair < s.pairs) {
      float4 sum = rotation[lane_of_head];
      for (int i = 1; i < chunks; ++i) {
        const float4 x = rotation[i * s.lanes + lane_of_head];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const int64_t at = (int64_t{block_index_x()} * s.heads * rank + int64_t{head} * rank + row) * s.state;
      g.of_q_bias[at + channels.first] = sum.x, g.of_k_bias[at + channels.first] = sum.z;
      if (channels.both) g.of_q_bias[at + channels.second] = sum.y, g.of_k_bias[at + channels.second] = sum.w;
    }
  }
  if (!active) return;
  const int column = a.column(group * heads, row);
  FW_UNROLL for (int t = 0; t < kSpan; ++t) {
    if (t >= chunk.count) continue;
    const int64_t token = chunk.begin + t;
    Pair::store(g.dq.data + token * g.dq.stride + column, channels, of_q[t].x, of_q[t].y);
    Pair::store(g.dk.data + token * g.dk.stride + column, channels, of_k[t].x, of_k[t].y);
    if (!rotated || s.own) continue;
    const float tanh_here = *a.tanh_at(token, 0, pair);
    g.of_angle[((group * rank + row) * g.tokens + token) * s.angles + pair] =
        (1.0f - tanh_here * tanh_here) * of_angle[t];
  }
}

// What all chunks after and a token's own give it: d_dt, a warp a head, and dangle, a thread a column.
template <class T>
__global__ void __launch_bounds__(kThreads) angle_gradients_kernel(const RowArgs<T> a, const BackwardArgs<T> g,
                                                                   const float* behind, Mat<T> dangle, Mat<T> d_dt) {
  const PairShape& s = a.shape;
  const RotaryOffsets::Chunk chunk = a.offsets.chunk(block_index_x());
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()), all = s.heads * s.angles;
  const float* const sums = behind + int64_t{block_index_x()} * all;
  const int parts = s.rank * ((s.angles + 31) / 32);
  for (int i = static_cast<int>(warp_index()); i < chunk.count * s.heads; i += kThreads / 32) {
    const int64_t t = chunk.begin + i / s.heads;
    const int h = i % s.heads;
    float sum = 0;
    for (int c = lane; c < s.angles; c += 32) sum += *a.tanh_at(t, h, c) * sums[h * s.angles + c];
    sum = warp_sum(sum);
    if (lane != 0) continue;
    for (int part = 0; part < parts; ++part) sum += g.of_dt[(part * g.tokens + t) * s.heads + h];
    d_dt.data[t * d_dt.stride + h] = stored<T>(kPi * sum);
  }
  const int columns = s.own ? all : s.angles, angle_parts = s.own ? s.rank : s.rank * s.groups;
  for (int i = thread; i < chunk.count * columns; i += kThreads) {
    const int64_t t = chunk.begin + i / columns;
    const int c = i % columns;
    const float tanh_here = a.tanhs[t * columns + c];
    float sum = 0, own = 0;
    if (s.own) {
      sum = a.dt_at(t, c / s.angles) * sums[c];
    } else {
      for (int h = 0; h < s.heads; ++h) sum += a.dt_at(t, h) * sums[h * s.angles + c];
    }
    for (int part = 0; part < angle_parts; ++part) own += g.of_angle[(part * g.tokens + t) * columns + c];
    dangle.data[t * dangle.stride + c] = stored<T>(kPi * ((1.0f - tanh_here * tanh_here) * sum + own));
  }
}

template <class T>
void make_angles(const Mamba3Shape& shape, Mat<const T> angle, Mat<const T> dt, const PassLayout& layout,
                 int64_t checkpoints, float* tanhs, double* totals, void* stream) {
  const bool own = angle.cols > shape.angles;
  const AngleArgs<T> args{
      angle, dt,    RotaryOffsets(layout), static_cast<int>(shape.heads), static_cast<int>(shape.angles), own,
      tanhs, totals};
  launch_following(dt.rows, angles_kernel<T>, Dim3{static_cast<unsigned>(checkpoints)}, kThreads,
                   own ? 0 : sizeof(double) * kSpan * static_cast<size_t>(shape.angles), stream, args);
}

}  // namespace

namespace ops {

template <class T>
void mamba3_rotary_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> q, Mat<const T> k,
                           const Wide<T>* q_bias, const Wide<T>* k_bias, Mat<const T> angle, Mat<const T> dt,
                           const PassLayout& layout, Wide<T>* start, Wide<T>* checkpoints, Mat<T> q_rows, Mat<T> k_rows,
                           Mat<Wide<T>> qk_self) {
  if (dt.rows == 0) return;
  void* const stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  const int64_t count = rotary_checkpoints(dt.rows, layout.host.count()), all = shape.heads * shape.angles;
  const RotaryScratch scratch(exec.arena, shape, dt.rows, angle.cols, layout.host.count(), checkpoints != nullptr);
  float* const before = checkpoints != nullptr ? checkpoints : scratch.checkpoints;
  make_angles(shape, angle, dt, layout, count, scratch.tanhs, scratch.totals, stream);
  scan_chunks<false>(ScanForward{scratch.totals, start, before}, layout, all, dt.rows, stream);
  const PairShape pairs(shape, angle.cols > shape.angles);
  const RowArgs<T> args{pairs, RotaryOffsets(layout), q, k, dt, q_bias, k_bias, scratch.tanhs, before};
  const ForwardArgs<T> to{q_rows, k_rows, qk_self};
  const bool one = shape.rank == 1 && pairs.tiles == 1,
             adjacent = adjacent_pairs<const T>(shape, {q, k, q_rows, k_rows});
  const int in_block = pairs.at_once();
  const Dim3 grid{static_cast<unsigned>(count), static_cast<unsigned>(parts_of(shape.heads, in_block)),
                  static_cast<unsigned>(pairs.tiles)};
  const auto run = [&]<bool kAdjacent, bool kOneRow>() {
    launch_following(dt.rows, rotary_forward_kernel<T, kAdjacent, kOneRow>, grid,
                     static_cast<unsigned>(pairs.lanes * in_block), sizeof(float) * kSpan * (kThreads / 32), stream,
                     args, to);
  };
  if (one) {
    adjacent ? run.template operator()<true, true>() : run.template operator()<false, true>();
    return;
  }
  adjacent ? run.template operator()<true, false>() : run.template operator()<false, false>();
  launch_following(dt.rows, qk_self_kernel<T>,
                   Dim3{static_cast<unsigned>(parts_of(dt.rows * shape.heads, kThreads / 32))}, kThreads, 0, stream,
                   args, qk_self);
}

template <class T>
void mamba3_rotary_backward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> dq_rows, Mat<const T> dk_rows,
                            Mat<const Wide<T>> dqk_self, Mat<const T> q, Mat<const T> k, const Wide<T>* q_bias,
                            const Wide<T>* k_bias, Mat<const T> angle, Mat<const T> dt, const Wide<T>* checkpoints,
                            const PassLayout& layout, Mat<T> dq, Mat<T> dk, Mat<T> dangle, Mat<T> d_dt,
                            Wide<T>* dq_bias, Wide<T>* dk_bias, Wide<T>* dstart) {
  const int64_t sequences = layout.host.count(), count = rotary_checkpoints(dt.rows, sequences),
                all = shape.heads * shape.angles;
  void* const stream = exec.device.stream();
  if (dt.rows == 0) {
    if (dstart != nullptr) exec.device.fill(dstart, 0, sizeof(float) * static_cast<size_t>(sequences * all));
    return;
  }
  const ArenaMark mark(exec.arena);
  const RotaryBackwardScratch scratch(exec.arena, shape, dt.rows, angle.cols, sequences);
  make_angles<T>(shape, angle, dt, layout, count, scratch.tanhs, nullptr, stream);
  const PairShape pairs(shape, angle.cols > shape.angles);
  const int chunks = pairs.at_once();
  const int64_t blocks = parts_of(count, chunks), biases = shape.heads * shape.rank * shape.state;
  const RowArgs<T> args{pairs, RotaryOffsets(layout), q, k, dt, q_bias, k_bias, scratch.tanhs, checkpoints};
  const BackwardArgs<T> back{
      dq_rows,        dk_rows,       dqk_self,         dq,      dk,   scratch.of_q_bias, scratch.of_k_bias,
      scratch.totals, scratch.of_dt, scratch.of_angle, dt.rows, count};
  const bool one = shape.rank == 1, adjacent = adjacent_pairs<const T>(shape, {q, k, dq_rows, dk_rows, dq, dk});
  const Dim3 grid{static_cast<unsigned>(blocks), static_cast<unsigned>(shape.groups * shape.rank),
                  static_cast<unsigned>(pairs.tiles)};
  const auto run = [&]<bool kAdjacent, bool kOneRow>() {
    launch(rotary_backward_kernel<T, kAdjacent, kOneRow>, grid, static_cast<unsigned>(pairs.lanes * chunks),
           2 * sizeof(float4) * static_cast<size_t>(pairs.lanes * chunks), stream, args, back);
  };
  if (one) {
    adjacent ? run.template operator()<true, true>() : run.template operator()<false, true>();
  } else {
    adjacent ? run.template operator()<true, false>() : run.template operator()<false, false>();
  }
  add_column_sums(scratch.of_q_bias, blocks, biases, dq_bias, stream);
  add_column_sums(scratch.of_k_bias, blocks, biases, dk_bias, stream);
  scan_chunks<true>(ScanBackward{scratch.totals, scratch.behind, dstart, static_cast<int>(shape.rank), count}, layout,
                    all, dt.rows, stream);
  launch(angle_gradients_kernel<T>, Dim3{static_cast<unsigned>(count)}, kThreads, 0, stream, args, back, scratch.behind,
         dangle, d_dt);
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void mamba3_rotary_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const float*, \
                                         const float*, Mat<const T>, Mat<const T>, const PassLayout&, float*, float*,  \
                                         Mat<T>, Mat<T>, Mat<float>);                                                  \
  template void mamba3_rotary_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,              \
                                          Mat<const float>, Mat<const T>, Mat<const T>, const float*, const float*,    \
                                          Mat<const T>, Mat<const T>, const float*, const PassLayout&, Mat<T>, Mat<T>, \
                                          Mat<T>, Mat<T>, float*, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
