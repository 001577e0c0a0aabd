// What the kernels of the preconditioner share: one chunk of one key head, cut into four runs of 16 tokens. Warp (run, column) has the
// tokens of a run and 64 channels, two a lane; K <= 256. Tokens past the end have alpha 1, gain 0 and a zero key: they change nothing.
#pragma once

#include "rule/precond.h"
#include "scan/cuda/device/state_rows.cuh"
#include "scan/cuda/launch.h"

namespace fw::cuda {

inline constexpr int kRuns = 4, kRun = kChunk / kRuns;

inline int precond_columns(int K) { return (K + 63) / 64; }

// exp, log and 1/x to about two units in the last place: the rest of what the kernels do takes no time next to the exact ones.
struct FastMath {
  FW_DEVICE static float log(float x) { return log2_fast(x) * 0.6931471805599453f; }
  FW_DEVICE static float exp(float x) { return exp2_fast(x * kLog2E); }
  FW_DEVICE static float inverse(float x) { return rcp_fast(x); }
};

// Two channels of the tokens of a run.
using RunRows = float[kRun][2];

// Rows [t, t + count) of a tensor, channels i and i + 1; the rest 0. All loads are under way before one is used.
FW_DEVICE void load_run(const Rows& rows, int64_t t, int count, int i, int K, RunRows& x) {
  const int size = rows.bf16 != 0 ? 2 : 4;
  const char* p = rows.data + (t * rows.stride + i) * size;
  const int64_t step = rows.stride * size;
  if (i + 2 <= K && reinterpret_cast<uintptr_t>(p) % (2 * size) == 0 && step % (2 * size) == 0) {
    if (rows.bf16 != 0) {
      uint32_t words[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) words[j] = j < count ? *reinterpret_cast<const uint32_t*>(p + j * step) : 0u;
#pragma unroll
      for (int j = 0; j < kRun; ++j) x[j][0] = bf16_low(words[j]), x[j][1] = bf16_high(words[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const float2 a = j < count ? *reinterpret_cast<const float2*>(p + j * step) : make_float2(0, 0);
        x[j][0] = a.x, x[j][1] = a.y;
      }
    }
    return;
  }
  RunRows slow;  // in local memory: this path shall not cost the other registers
  FW_NO_UNROLL
  for (int j = 0; j < kRun; ++j) {
    slow[j][0] = j < count && i < K ? load_element(rows, t + j, i) : 0.0f;
    slow[j][1] = j < count && i + 1 < K ? load_element(rows, t + j, i + 1) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) x[j][0] = slow[j][0], x[j][1] = slow[j][1];
}

// x += the same of a float32 tensor.
FW_DEVICE void add_run(const float* rows, int64_t stride, int count, int i, int K, RunRows& x) {
  const float* p = rows + i;
  if (i + 2 <= K && reinterpret_cast<uintptr_t>(p) % 8 == 0 && stride % 2 == 0) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float2 a = j < count ? *reinterpret_cast<const float2*>(p + j * stride) : make_float2(0, 0);
      x[j][0] += a.x, x[j][1] += a.y;
    }
    return;
  }
  RunRows slow;
  FW_NO_UNROLL
  for (int j = 0; j < kRun; ++j) {
    slow[j][0] = j < count && i < K ? p[j * stride] : 0.0f;
    slow[j][1] = j < count && i + 1 < K ? p[j * stride + 1] : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) x[j][0] += slow[j][0], x[j][1] += slow[j][1];
}

FW_DEVICE void store_run(const Rows& rows, int64_t t, int count, int i, int K, const RunRows& x) {
  const int size = rows.bf16 != 0 ? 2 : 4;
  char* p = rows.data + (t * rows.stride + i) * size;
  const int64_t step = rows.stride * size;
  if (i + 2 <= K && reinterpret_cast<uintptr_t>(p) % (2 * size) == 0 && step % (2 * size) == 0) {
    if (rows.bf16 != 0) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (j < count) *reinterpret_cast<uint32_t*>(p + j * step) = pack_bf16(x[j][0], x[j][1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (j < count) *reinterpret_cast<float2*>(p + j * step) = make_float2(x[j][0], x[j][1]);
      }
    }
    return;
  }
  RunRows slow;
#pragma unroll
  for (int j = 0; j < kRun; ++j) slow[j][0] = x[j][0], slow[j][1] = x[j][1];
  FW_NO_UNROLL
  for (int j = 0; j < count && j < kRun; ++j) {
    if (i < K) store_element(rows, t + j, i, slow[j][0]);
    if (i + 1 < K) store_element(rows, t + j, i + 1, slow[j][1]);
  }
}

// Where a block and a thread are.
struct ChunkPlace {
  int chunk, h, n;
  int first, rows;  // tokens of the sequence: the chunk's first, and how many it has
  int run, column, columns, lane;
  int token, count;  // the run's first token of the sequence, and how many of its tokens exist (0 or less: none)
  int channel;       // the first of this lane's two
};
FW_DEVICE ChunkPlace chunk_place(const Problem& x, int64_t item) {
  ChunkPlace c;
  c.chunk = static_cast<int>(item / x.H);
  c.h = static_cast<int>(item % x.H);
  c.n = sequence_of_chunk(x.sequences, c.chunk);
  c.first = (c.chunk - first_chunk(x.sequences, c.n)) * kChunk;
  c.rows = sequence_length(x.sequences, c.n) - c.first;
  c.rows = c.rows < kChunk ? c.rows : kChunk;
  c.lane = static_cast<int>(lane_index());
  c.columns = static_cast<int>(block_size()) / (32 * kRuns);
  c.run = static_cast<int>(warp_index()) / c.columns;
  c.column = static_cast<int>(warp_index()) % c.columns;
  c.token = c.first + c.run * kRun;
  c.count = c.rows - c.run * kRun;
  c.channel = c.column * 64 + 2 * c.lane;
  return c;
}

// In shared memory.
struct ChunkShared {
  float square[4][kChunk];         // |k|^2 by column
  float alpha[kChunk];             // exp(g)
  float gain[kChunk];              // beta kn^2, kn the factor that normalises k
  float kn2[kChunk];               // kn^2
  float product[kRuns];            // of a run's alphas
  float sum[kRuns][256];           // what a run adds to A; then, going back, to its gradient
  float pair[4][kRuns][2 * kRun];  // going back: by column and run, sum dA A_before of each token, then sum dA k^2
  float own[kChunk], common[kChunk];
  float center[4 * kRuns];
};

// alpha, gain and kn2 of the chunk's tokens from the keys of the runs.
FW_DEVICE void chunk_gates(const Problem& x, const ChunkPlace& c, const RunRows& k, ChunkShared& shared) {
  float squares[kRun];
#pragma unroll
  for (int j = 0; j < kRun; ++j) squares[j] = fmaf(k[j][1], k[j][1], k[j][0] * k[j][0]);
  const float square = scattered_sum(squares, c.lane);
  if (c.lane % 2 == 0) shared.square[c.column][c.run * kRun + c.lane / 2] = square;
  sync_threads();
  const int t = static_cast<int>(thread_index());
  if (t < kChunk) {
    float k2 = 0;
    for (int i = 0; i < c.columns; ++i) k2 += shared.square[i][t];
    const float kn = k_factor(x.rule, k2);
    float alpha = 1, beta = 0;
    if (t < c.rows) {
      alpha = expf(load_element(rows_of(x.in.precond_g, x.sequences, c.n, c.h * x.group), c.first + t, 0));
      beta = load_element(rows_of(x.in.precond_beta, x.sequences, c.n, c.h * x.group), c.first + t, 0);
    }
    shared.alpha[t] = alpha;
    shared.gain[t] = beta * kn * kn;
    shared.kn2[t] = kn * kn;
    shared.square[0][t] = k2;
  }
  sync_threads();
}

// What each run makes of A = 0, and its product of alphas, into shared memory.
FW_DEVICE void run_sums(const ChunkPlace& c, const RunRows& k, ChunkShared& shared) {
  float product = 1, sum0 = 0, sum1 = 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const float alpha = shared.alpha[c.run * kRun + j], gain = shared.gain[c.run * kRun + j];
    product *= alpha;
    sum0 = fmaf(alpha, sum0, gain * k[j][0] * k[j][0]);
    sum1 = fmaf(alpha, sum1, gain * k[j][1] * k[j][1]);
  }
  shared.sum[c.run][c.channel] = sum0;
  shared.sum[c.run][c.channel + 1] = sum1;
  if (c.column == 0 && c.lane == 0) shared.product[c.run] = product;
  sync_threads();
}

// A before the run from that before the chunk.
FW_DEVICE float run_start(const ChunkPlace& c, const ChunkShared& shared, int channel, float a) {
  for (int i = 0; i < c.run; ++i) a = fmaf(shared.product[i], a, shared.sum[i][channel]);
  return a;
}

// The whole chunk as A -> product A + sum.
struct ChunkMap {
  float product, sum[2];
};
FW_DEVICE ChunkMap chunk_map(const ChunkPlace& c, const ChunkShared& shared) {
  ChunkMap map{1, {0, 0}};
  for (int i = 0; i < kRuns; ++i) {
    map.product *= shared.product[i];
    map.sum[0] = fmaf(shared.product[i], map.sum[0], shared.sum[i][c.channel]);
    map.sum[1] = fmaf(shared.product[i], map.sum[1], shared.sum[i][c.channel + 1]);
  }
  return map;
}

// Two channels of [chunks, H, dim] floats or of a state [N, H, K]; channels past K are 0 and stay unwritten.
FW_DEVICE void load_pair(const float* p, int channel, int K, float (&x)[2]) {
  x[0] = channel < K ? p[channel] : 0.0f;
  x[1] = channel + 1 < K ? p[channel + 1] : 0.0f;
}
FW_DEVICE void store_pair(float* p, int channel, int K, float x0, float x1) {
  if (channel < K) p[channel] = x0;
  if (channel + 1 < K) p[channel + 1] = x1;
}
FW_DEVICE float load_precond(const StateArg& a, int64_t n, int h, int channel) {
  if (a.data == nullptr) return 0;
  const int64_t at = n * a.stride_n + h * a.stride_h + channel * a.stride_k;
  return a.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.data)[at]) : static_cast<const float*>(a.data)[at];
}
FW_DEVICE void store_precond(const StateArg& a, int64_t n, int h, int channel, float x) {
  if (a.data == nullptr) return;
  const int64_t at = n * a.stride_n + h * a.stride_h + channel * a.stride_k;
  if (a.bf16 != 0) {
    static_cast<uint16_t*>(a.data)[at] = bf16_bits(x);
  } else {
    static_cast<float*>(a.data)[at] = x;
  }
}

// Walks over the chunks of a sequence, from the first or from the last: x = a[c] x + b[c], and leaves the x before every step. A block has
// 32 channels of one key head; the steps themselves are one warp's.
struct ChunkWalk {
  const float* maps;  // [chunks, H, stride]: a, then b [K]
  int64_t stride;
  float* before;  // [chunks, H, before_stride]: [K]
  int64_t before_stride;
  StateArg from, to;
  const int32_t* slots;
};
constexpr int kWalkThreads = 256, kWalkChunks = 64;

template <bool kReverse>
__global__ void __launch_bounds__(kWalkThreads)
    chunk_walk_kernel(const __grid_constant__ SequenceArg sequences, int H, int K, const __grid_constant__ ChunkWalk walk) {
  float* const a = reinterpret_cast<float*>(shared_memory());
  float* const b = a + kWalkChunks;  // [chunk][32]
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int groups = (K + 31) / 32;
  const int64_t item = block_index_x() / static_cast<unsigned>(groups);
  const int n = static_cast<int>(item / H), h = static_cast<int>(item % H);
  const int channel = static_cast<int>(block_index_x() % static_cast<unsigned>(groups)) * 32 + lane;
  const int slot = walk.slots != nullptr ? walk.slots[n] : n;
  if (slot < 0) return;
  const int64_t first = first_chunk(sequences, n);
  const int chunks = chunk_count(sequences, n);
  float x = warp == 0 && channel < K ? load_precond(walk.from, slot, h, channel) : 0.0f;
  for (int done = 0; done < chunks; done += kWalkChunks) {
    const int count = chunks - done < kWalkChunks ? chunks - done : kWalkChunks;
    const auto place = [&](int i) { return (first + (kReverse ? chunks - 1 - done - i : done + i)) * H + h; };
    for (int i = warp; i < count; i += kWalkThreads / 32) {
      const float* map = walk.maps + place(i) * walk.stride;
      if (channel < K) b[i * 32 + lane] = map[1 + channel];
      if (lane == 0) a[i] = map[0];
    }
    sync_threads();
    if (warp == 0 && channel < K) {
      for (int i = 0; i < count; ++i) {
        const float next = fmaf(a[i], x, b[i * 32 + lane]);
        b[i * 32 + lane] = x;
        x = next;
      }
    }
    sync_threads();
    for (int i = warp; i < count; i += kWalkThreads / 32) {
      if (channel < K) walk.before[place(i) * walk.before_stride + channel] = b[i * 32 + lane];
    }
    sync_threads();
  }
  if (warp == 0 && channel < K) store_precond(walk.to, slot, h, channel, x);
}

template <bool kReverse>
void walk_chunks(const Problem& x, const ChunkWalk& walk, void* stream) {
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) * x.H * ((x.K + 31) / 32))};
  launch(chunk_walk_kernel<kReverse>, grid, kWalkThreads, sizeof(float) * kWalkChunks * 33, stream, x.sequences, x.H, x.K, walk);
}

}  // namespace fw::cuda
