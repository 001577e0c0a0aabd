// What the kernels of the preconditioner share: one chunk of one key head, cut into 16 runs of four tokens. A group of kLanes lanes has
// the tokens of a run, a lane eight neighbouring channels; K <= 8 kLanes. Tokens past the end have alpha 1, gain 0 and a zero key: they
// change nothing.
#pragma once

#include "scan/cuda/device/precond_math.cuh"
#include "scan/cuda/device/state_rows.cuh"
#include "scan/cuda/launch.h"

namespace fw::cuda {

inline constexpr int kRun = 4, kRuns = kChunk / kRun, kOwn = 8;
// Twice as many as channels: those below kOwn kLanes have one channel each where runs are put together.
template <int kLanes>
inline constexpr int kPrecondThreads = kRuns* kLanes;

// This lane's channels of the tokens of a run.
using RunRows = float[kRun][kOwn];

// Rows of a run in memory. wide: all of them can be read and written 16 bytes at a time.
struct RunPlace {
  char* data;    // the lane's first channel of the first token
  int64_t step;  // bytes
  int count;     // tokens that exist
  int channels;  // from the lane's first on (0 or less: it has none)
  int32_t bf16;
  bool wide;
};
FW_DEVICE RunPlace run_place(const Rows& rows, int64_t t, int count, int i, int K) {
  const int size = rows.bf16 != 0 ? 2 : 4;
  RunPlace p{rows.data + (t * rows.stride + i) * size, rows.stride * size, count, K - i, rows.bf16, false};
  p.wide = K % kOwn == 0 && ((reinterpret_cast<uintptr_t>(p.data) | static_cast<uintptr_t>(p.step)) & 15) == 0;
  return p;
}

// The rest are 0. One by one where the rows are not wide.
FW_DEVICE void load_run(const RunPlace& p, RunRows& x) {
  if (p.wide) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) x[j][i] = 0;
      if (j < p.count && p.channels > 0) load_channels({p.data + j * p.step, 0, p.bf16}, 0, 0, kOwn, x[j]);
    }
    return;
  }
  RunRows slow;  // in local memory: this path shall not cost the others registers
  FW_NO_UNROLL
  for (int e = 0; e < kRun * kOwn; ++e) {
    const int j = e / kOwn, i = e % kOwn;
    const bool real = j < p.count && i < p.channels;
    slow[j][i] = real ? load_element({p.data + j * p.step, 0, p.bf16}, 0, i) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[j][i] = slow[j][i];
  }
}
// The same through shared memory, so that many loads can be under way without registers. start_run() starts the copies, neighbouring
// lanes taking neighbouring pieces of 16 bytes; take_run(), after cp_async_wait and a barrier of the warp, has the rows.
template <int kLanes>
FW_DEVICE char* staged_row(char* stage, int run, int j) {
  return stage + 4 * kOwn * kLanes * (run * kRun + j);
}
template <int kLanes>
FW_DEVICE void start_run(const RunPlace& p, int run, int lane, char* stage) {
  if (!p.wide) return;
  const int pieces = (p.channels + kOwn * lane) / (p.bf16 != 0 ? 8 : 4);  // of a row
  const char* const first = p.data + (p.bf16 != 0 ? 0 : -16 * lane);
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const bool real = j < p.count;
    const uint32_t to = shared_address(staged_row<kLanes>(stage, run, j)) + 16 * lane;
    const char* const from = first + (real ? j * p.step : 0);
    if (lane < pieces) cp_async_16(to, from, real);
    if (lane + kLanes < pieces) cp_async_16(to + 16 * kLanes, from + 16 * kLanes, real);
  }
}
template <int kLanes>
FW_DEVICE void take_run(const RunPlace& p, int run, int lane, char* stage, RunRows& x) {
  if (!p.wide || p.channels <= 0) return load_run(p, x);
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const char* const from = staged_row<kLanes>(stage, run, j);
    if (p.bf16 != 0) {
      uint32_t words[kOwn / 2];
      load_wide<kOwn>(from + 16 * lane, words);
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) x[j][i] = bf16_low(words[i / 2]), x[j][i + 1] = bf16_high(words[i / 2]);
    } else {
      load_wide<kOwn>(from + 32 * lane, x[j]);
    }
  }
}
template <int kLanes>
inline constexpr int kStageBytes = 4 * kChunk* kOwn* kLanes;

FW_DEVICE void add_run(const RunPlace& p, RunRows& x) {
  RunRows more;
  load_run(p, more);
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[j][i] += more[j][i];
  }
}
// Row j of a run.
FW_DEVICE void store_run_row(const RunPlace& p, int j, const float (&x)[kOwn]) {
  if (j >= p.count || p.channels <= 0) return;
  char* const to = p.data + j * p.step;
  if (p.wide && p.bf16 != 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  } else if (p.wide) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + 16) = make_float4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i < p.channels) store_element({to, 0, p.bf16}, 0, i, x[i]);
    }
  }
}

// Where a block and a thread are.
struct ChunkPlace {
  int chunk = -1, h = 0, n = 0;  // chunk -1: none
  int first, rows;               // tokens of the sequence: the chunk's first, and how many it has
  int thread, run, lane;
  int token, count;  // the run's first token of the sequence, and how many of its tokens exist (0 or less: none)
  int channel;       // the first of this lane's
};
// Blocks: a key head each (neighbouring blocks, for their rows are neighbours in memory) of the chunks, in order; of the sequences, if they
// are equally long.
inline Dim3 chunk_grid(const Problem& x, int64_t chunks) {
  constexpr unsigned kMost = 32768;
  const unsigned H = static_cast<unsigned>(x.H), count = static_cast<unsigned>(chunks), each = static_cast<unsigned>(x.sequences.chunks);
  if (x.sequences.offsets == nullptr && each <= kMost && static_cast<unsigned>(x.sequences.N) <= kMost) return {H, each, static_cast<unsigned>(x.sequences.N)};
  const unsigned rows = count < kMost ? count : kMost;
  return {H, rows, rows > 0 ? (count + rows - 1) / rows : 0};
}

template <int kLanes>
FW_DEVICE ChunkPlace chunk_place(const Problem& x, int chunks, bool from_last) {
  ChunkPlace c;
  const SequenceArg& s = x.sequences;
  const int block = static_cast<int>(block_index_z() * grid_size_y() + block_index_y()), z = static_cast<int>(block_index_z());
  c.chunk = from_last ? chunks - 1 - block : block;
  if (c.chunk < 0 || c.chunk >= chunks) return {-1};
  c.h = static_cast<int>(block_index_x());
  const bool by_sequence = s.offsets == nullptr && grid_size_z() == static_cast<unsigned>(s.N) && grid_size_y() == static_cast<unsigned>(s.chunks);
  c.n = !by_sequence ? sequence_of_chunk(s, c.chunk) : from_last ? s.N - 1 - z : z;
  c.first = (c.chunk - first_chunk(x.sequences, c.n)) * kChunk;
  c.rows = sequence_length(x.sequences, c.n) - c.first;
  c.rows = c.rows < kChunk ? c.rows : kChunk;
  c.thread = static_cast<int>(thread_index());
  c.run = c.thread / kLanes;
  c.lane = c.thread % kLanes;
  c.token = c.first + c.run * kRun;
  c.count = c.rows - c.run * kRun;
  c.channel = kOwn * c.lane;
  return c;
}

// In shared memory.
template <int kLanes>
struct ChunkShared {
  float sum[kRuns][kOwn * kLanes];  // what a run adds to A, then A before it; going back the same of its gradient
  float square[kChunk];             // |k|^2
  float alpha[kChunk];              // exp(g)
  float gain[kChunk];               // beta kn^2, kn the factor that normalises k
  float kn2[kChunk];                // kn^2
  float product[kRuns];             // of a run's alphas
  float pair[kRuns][2 * kRun];      // going back: sum dA A_before of each token, then sum dA k^2
  float own[kChunk], common[kChunk];
  float center[32];
};

// The preconditioner's gates of token `thread` of the chunk, as they lie in memory: so that nothing waits for them while keys are loaded.
struct ChunkGates {
  uint32_t g = 0, beta = 0;
};
FW_DEVICE uint32_t load_raw(const Rows& rows, int64_t t) {
  return rows.bf16 != 0 ? uint32_t{reinterpret_cast<const uint16_t*>(rows.data)[t * rows.stride]}
                        : reinterpret_cast<const uint32_t*>(rows.data)[t * rows.stride];
}
FW_DEVICE float raw_value(const TokenArg& a, uint32_t raw) { return bits_float(raw << (a.bf16 != 0 ? 16 : 0)); }
FW_DEVICE ChunkGates load_gates(const Problem& x, const ChunkPlace& c) {
  ChunkGates gates;
  if (c.thread < c.rows) {
    gates.g = load_raw(key_rows(x.in.precond_g, x.sequences, c.n, c.h), c.first + c.thread);
    gates.beta = load_raw(key_rows(x.in.precond_beta, x.sequences, c.n, c.h), c.first + c.thread);
  }
  return gates;
}

// alpha, gain and kn2 of the chunk's tokens from the keys of the runs.
template <int kLanes>
FW_DEVICE void chunk_gates(const Problem& x, const ChunkPlace& c, const ChunkGates& gates, const RunRows& k, ChunkShared<kLanes>& shared) {
  float squares[kRun];
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    squares[j] = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) squares[j] = fmaf(k[j][i], k[j][i], squares[j]);
  }
  const float square = scattered_sum<kRun, kLanes / 2>(squares, c.lane);
  if (c.lane % (kLanes / kRun) == 0) shared.square[c.run * kRun + c.lane / (kLanes / kRun)] = square;
  sync_threads();
  if (c.thread < kChunk) {
    const float kn = k_factor(x.rule, shared.square[c.thread]);
    shared.alpha[c.thread] = expf(raw_value(x.in.precond_g, gates.g));  // of a token past the end: 1
    shared.gain[c.thread] = raw_value(x.in.precond_beta, gates.beta) * kn * kn;
    shared.kn2[c.thread] = kn * kn;
  }
  sync_threads();
}

// f(map) with the form of M known to the compiler: a branch for every element would cost as much as M does.
template <class F>
FW_DEVICE void with_form(PrecondMap<float> map, F&& f) {
  if (map.squashed) {
    map.squashed = true, map.previous = false;
    f(map);
  } else {
    map.squashed = false;
    f(map);
  }
}

FW_DEVICE void put_own(float* to, const float (&x)[kOwn]) { store_wide<kOwn>(reinterpret_cast<char*>(to), 0, x); }
FW_DEVICE void get_own(const float* from, float (&x)[kOwn]) { load_wide<kOwn>(reinterpret_cast<const char*>(from), x); }

// What each run makes of A = 0, and its product of alphas, into shared memory.
template <int kLanes>
FW_DEVICE void run_sums(const ChunkPlace& c, const RunRows& k, ChunkShared<kLanes>& shared) {
  float product = 1, sum[kOwn] = {};
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const float alpha = shared.alpha[c.run * kRun + j], gain = shared.gain[c.run * kRun + j];
    product *= alpha;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] = fmaf(alpha, sum[i], gain * k[j][i] * k[j][i]);
  }
  put_own(&shared.sum[c.run][c.channel], sum);
  if (c.lane == 0) shared.product[c.run] = product;
  sync_threads();
}

// The whole chunk for channel `thread` as A -> product A + sum.
struct ChunkMap {
  float product = 1, sum = 0;
};
template <bool kReverse, int kLanes>
FW_DEVICE ChunkMap chunk_map(const ChunkPlace& c, const ChunkShared<kLanes>& shared) {
  ChunkMap map;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int run = kReverse ? kRuns - 1 - i : i;
    map.product *= shared.product[run];
    map.sum = fmaf(shared.product[run], map.sum, shared.sum[run][c.thread]);
  }
  return map;
}
// From what channel `thread` is before the chunk (going back: behind it) to what it is before (behind) each run, in place of the sums.
template <bool kReverse, int kLanes>
FW_DEVICE void run_starts(const ChunkPlace& c, float a, ChunkShared<kLanes>& shared) {
  if (c.thread < kOwn * kLanes) {
    float sums[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) sums[i] = shared.sum[i][c.thread];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int run = kReverse ? kRuns - 1 - i : i;
      shared.sum[run][c.thread] = a;
      a = fmaf(shared.product[run], a, sums[run]);
    }
  }
  sync_threads();
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
  grid_dependency_launch();
  grid_dependency_wait();
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
  launch_overlapped(chunk_walk_kernel<kReverse>, grid, kWalkThreads, sizeof(float) * kWalkChunks * 33, stream, x.sequences, x.H, x.K, walk);
}

}  // namespace fw::cuda
