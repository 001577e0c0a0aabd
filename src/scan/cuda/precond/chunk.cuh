// What the kernels of the preconditioner share: where a block's chunk lies, rows of tensors in registers, and the walk
// over chunks. A block has one chunk of one key head: common/precond_rows.cuh.
#pragma once

#include "gpu/launch.h"
#include "scan/cuda/common/precond_rows.cuh"
#include "scan/cuda/common/state/state_load.cuh"

namespace fw::cuda {

inline constexpr int kPrecondThreads = 32 * kRuns;

// The warp's tokens of a tensor, or this lane's channels of them: as they lie in memory until unpack_tokens().
template <int kN>
using RunRows = float[kRunTokens][kN];
struct RunCoord {
  char* data;    // the lane's first channel of the warp's first token
  int64_t step;  // bytes from token to token
  int count;     // tokens that exist (0 or less: none)
  int channels;  // from the lane's first on (0 or less: none)
  int32_t bf16;
  bool wide;  // a lane's channels can be read and written together
};
template <int kN>
FW_DEVICE RunCoord run_coord(const Rows& rows, int64_t t, int count, int i, int K) {
  const int size = rows.bf16 != 0 ? 2 : 4, vector = kN * size < 16 ? kN * size : 16;
  RunCoord p{rows.data + (t * rows.stride + i) * size, rows.stride * size, count, K - i, rows.bf16, false};
  p.wide = K % kN == 0 && ((reinterpret_cast<uintptr_t>(p.data) | static_cast<uintptr_t>(p.step)) &
                           static_cast<uintptr_t>(vector - 1)) == 0;
  return p;
}
// What does not exist is 0. Nothing is waited for where rows are wide.
template <int kN, int kCount>
FW_DEVICE void load_tokens(const RunCoord& p, float (&x)[kCount][kN]) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
#pragma unroll
    for (int j = 0; j < kN; ++j) x[r][j] = 0;
  }
  if (p.channels <= 0) return;
  if (p.wide && p.bf16 != 0) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if (r < p.count) load_words<kN / 2>(p.data + r * p.step, x[r]);
    }
  } else if (p.wide) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if (r < p.count) load_words<kN>(p.data + r * p.step, x[r]);
    }
  } else {
    float slow[kCount][kN];  // in local memory: this path shall not cost the others registers
    FW_NO_UNROLL
    for (int e = 0; e < kCount * kN; ++e) {
      const int r = e / kN, j = e % kN;
      slow[r][j] = r < p.count && j < p.channels ? load_element({p.data + r * p.step, 0, p.bf16}, 0, j) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
#pragma unroll
      for (int j = 0; j < kN; ++j) x[r][j] = slow[r][j];
    }
  }
}
// Loads them into the L2 cache: rows of at most four lines.
template <int kN>
FW_DEVICE void prefetch_tokens(const RunCoord& p, int K, int lane) {
  const int size = p.bf16 != 0 ? 2 : 4, r = lane / 4, at = lane % 4 * 128;
  if (r < p.count && at < K * size) prefetch_line(p.data + r * p.step - lane * kN * size + at);
}
template <int kN, int kCount>
FW_DEVICE void unpack_tokens(const RunCoord& p, float (&x)[kCount][kN]) {
  if (p.wide && p.bf16 != 0) unpack_rows<kN, kCount>(x);
}
template <int kN, int kCount>
FW_DEVICE void add_tokens(const RunCoord& p, float (&x)[kCount][kN]) {
  float more[kCount][kN];
  load_tokens(p, more);
  unpack_tokens(p, more);
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
#pragma unroll
    for (int j = 0; j < kN; ++j) x[r][j] += more[r][j];
  }
}
template <int kN>
FW_DEVICE void store_token(const RunCoord& p, int r, const float (&x)[kN]) {
  if (r >= p.count || p.channels <= 0) return;
  char* const to = p.data + r * p.step;
  if (p.wide) return store_wide<kN>(to, p.bf16, x);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < p.channels) store_element({to, 0, p.bf16}, 0, j, x[j]);
  }
}

// A tensor whose tokens of all sequences are equally far apart, in bytes: few instructions to an address, which
// otherwise are as many as those of the arithmetic. data null: not so, or rows that are not whole.
struct FlatTensor {
  char* data = nullptr;
  int32_t step = 0, head = 0;  // from token to token, from key head to key head
  int32_t bf16 = 0;
};
// `vector`: what is read at once, in numbers. Host.
inline FlatTensor flat_tensor(const Problem& x, const TokenArg& a, int vector) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t size = a.bf16 != 0 ? 2 : 4, step = a.stride_t * size, head = a.stride_h * size;
  const int64_t bytes = vector * size < 16 ? vector * size : 16;
  const bool even = x.sequences.offsets != nullptr || x.B == 1 || a.stride_b == x.T * a.stride_t;
  const bool aligned = ((static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.data)) | step | head) & (bytes - 1)) == 0;
  if (a.data == nullptr || !even || !aligned || step < 0 || head < 0 || step >= kMost || head >= kMost) return {};
  return {static_cast<char*>(a.data), static_cast<int32_t>(step), static_cast<int32_t>(head), a.bf16};
}
// Rows of K, of which each lane reads its `channels`: flat only if all lanes have them.
inline FlatTensor flat_rows(const Problem& x, const TokenArg& a, int channels) {
  return x.K == 32 * channels ? flat_tensor(x, a, channels) : FlatTensor{};
}
// Gates: a number of each token and head.
inline FlatTensor flat_gates(const Problem& x, const TokenArg& a) { return flat_tensor(x, a, 1); }
// float [tokens, heads, K] of the workspace; group heads for a key head.
FW_HOST_DEVICE inline TokenArg workspace_rows(const Problem& x, const float* data, int heads) {
  TokenArg a;
  a.data = const_cast<float*>(data);
  a.stride_h = static_cast<int64_t>(heads / x.H) * x.K;
  a.stride_t = static_cast<int64_t>(heads) * x.K;
  a.stride_b = x.T * a.stride_t;
  return a;
}
FW_DEVICE char* flat_address(const FlatTensor& t, int64_t token, int h) {
  return t.data + static_cast<int64_t>(t.step) * token + static_cast<int64_t>(t.head) * h;
}

// Where a block and a thread are.
struct RunBlock {
  int chunk = -1, h = 0, n = 0;  // chunk -1: none
  int warp, lane, channel;       // the first of this lane's
  // the warp's first token of the sequence, and how many of its tokens exist (0 or less: none)
  int token, count;
  int64_t flat;  // the same token of all sequences
};
// Blocks: a key head each (neighbouring blocks, for their rows are neighbours in memory) of the chunks, in order; of
// the sequences, if they are equally long.
inline bool by_sequence(const Problem& x) {
  constexpr int kMost = 32768;
  return x.sequences.offsets == nullptr && x.sequences.chunks <= kMost && x.sequences.N <= kMost;
}
inline Dim3 chunk_grid(const Problem& x, int64_t chunks) {
  constexpr unsigned kMost = 32768;
  const unsigned H = static_cast<unsigned>(x.H), count = static_cast<unsigned>(chunks);
  if (by_sequence(x)) return {H, static_cast<unsigned>(x.sequences.chunks), static_cast<unsigned>(x.sequences.N)};
  const unsigned rows = count < kMost ? count : kMost;
  return {H, rows, rows > 0 ? (count + rows - 1) / rows : 0};
}
// of_sequences: by_sequence().
template <int kN>
FW_DEVICE RunBlock run_block(const Problem& x, int chunks, bool of_sequences, bool from_last) {
  RunBlock c;
  const SequenceArg& s = x.sequences;
  c.h = static_cast<int>(block_index_x());
  c.warp = static_cast<int>(warp_index());
  c.lane = static_cast<int>(lane_index());
  c.channel = kN * c.lane;
  if (of_sequences) {
    c.n = static_cast<int>(from_last ? grid_size_z() - 1 - block_index_z() : block_index_z());
    const int of_sequence = static_cast<int>(from_last ? grid_size_y() - 1 - block_index_y() : block_index_y());
    c.chunk = c.n * s.chunks + of_sequence;
    c.token = of_sequence * kChunk + c.warp * kRunTokens;
    c.count = s.T - c.token;
    c.flat = static_cast<int64_t>(c.n) * s.T + c.token;
    return c;
  }
  const int block = static_cast<int>(block_index_z() * grid_size_y() + block_index_y());
  chunks = static_cast<int>(chunks_there(s, chunks));
  c.chunk = from_last ? chunks - 1 - block : block;
  if (c.chunk < 0 || c.chunk >= chunks) {
    c.chunk = -1;
    return c;
  }
  c.n = sequence_of_chunk(s, c.chunk);
  c.token = (c.chunk - first_chunk(s, c.n)) * kChunk + c.warp * kRunTokens;
  c.count = sequence_length(s, c.n) - c.token;
  c.flat = first_token(s, c.n) + c.token;
  return c;
}

// The warp's tokens of a tensor: fast where it is flat and they all exist, else as any tensor.
template <int kN>
struct RunTensor {
  bool fast;
  const FlatTensor& flat;
  char* at;
  RunCoord coord;

  // rows(): the tensor's, of the sequence and head.
  template <class GetRows>
  FW_DEVICE RunTensor(const Problem& x, const FlatTensor& tensor, const RunBlock& c, GetRows&& rows)
      : fast(tensor.data != nullptr && c.count >= kRunTokens), flat(tensor), at(nullptr), coord() {
    if (fast) {
      at = flat_address(flat, c.flat, c.h) + c.channel * (flat.bf16 != 0 ? 2 : 4);
    } else {
      coord = run_coord<kN>(rows(), c.token, c.count, c.channel, x.K);
    }
  }
  FW_DEVICE char* token(int r) const { return at + static_cast<int64_t>(flat.step) * r; }
  // kCount tokens from `first` on, as load_tokens() and unpack_tokens().
  template <int kCount>
  FW_DEVICE void load(int first, float (&x)[kCount][kN]) const {
    if (fast && flat.bf16 != 0) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) load_words<kN / 2>(token(first + r), x[r]);
    } else if (fast) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) load_words<kN>(token(first + r), x[r]);
    } else {
      RunCoord part = coord;
      part.data += first * part.step, part.count -= first;
      load_tokens(part, x);
    }
  }
  template <int kCount>
  FW_DEVICE void unpack(float (&x)[kCount][kN]) const {
    if (fast ? flat.bf16 != 0 : coord.wide && coord.bf16 != 0) unpack_rows<kN, kCount>(x);
  }
  FW_DEVICE void store(int r, const float (&x)[kN]) const {
    if (fast) {
      store_wide<kN>(token(r), flat.bf16, x);
    } else {
      store_token<kN>(coord, r, x);
    }
  }
  FW_DEVICE void prefetch(int K, int lane) const {
    if (!fast) return prefetch_tokens<kN>(coord, K, lane);
    const int size = flat.bf16 != 0 ? 2 : 4, from = lane % 4 * 128;
    if (from < K * size) prefetch_line(token(lane / 4) - lane * kN * size + from);
  }
};

enum class KeyRows { kFlat, kAny };  // kFlat: of tensors that are flat and of bf16

// Eight tokens of a tensor that is flat and of bf16, as they lie in memory: half the registers, and few to an address.
template <int kN>
struct FlatRun {
  float words[kRunTokens][kN / 2];

  FW_DEVICE static char* address(const FlatTensor& t, const RunBlock& c) {
    return flat_address(t, c.flat, c.h) + 2 * c.channel;
  }
  FW_DEVICE void load(const FlatTensor& t, const RunBlock& c) {
    const char* const at = address(t, c);
#pragma unroll
    for (int r = 0; r < kRunTokens; ++r) {
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) words[r][j] = 0;
      if (r < c.count) load_words<kN / 2>(at + static_cast<int64_t>(t.step) * r, words[r]);
    }
  }
  FW_DEVICE void row(int r, float (&x)[kN]) const {
#pragma unroll
    for (int j = 0; j < kN / 2; ++j)
      x[2 * j] = bf16_low(float_bits(words[r][j])), x[2 * j + 1] = bf16_high(float_bits(words[r][j]));
  }
  FW_DEVICE static void store(const FlatTensor& t, const RunBlock& c, int r, const float (&x)[kN]) {
    if (r < c.count) store_wide<kN>(address(t, c) + static_cast<int64_t>(t.step) * r, 1, x);
  }
};
// The preconditioner's gates of the warp's token lane / 4, as they lie in memory: nothing waits for them while keys are
// loaded.
struct RawGates {
  uint32_t g = 0, beta = 0;
};
FW_DEVICE uint32_t load_raw(const FlatTensor& flat, const TokenArg& a, const Problem& x, const RunBlock& c) {
  const int t = c.lane / 4;
  const char* at = flat.data != nullptr ? flat_address(flat, c.flat + t, c.h) : nullptr;
  if (at == nullptr) {
    const Rows rows = key_rows(a, x.sequences, c.n, c.h);
    at = rows.data + (c.token + t) * rows.stride * (a.bf16 != 0 ? 2 : 4);
  }
  return load_bits(a.bf16 != 0, at);
}
FW_DEVICE RawGates load_gates(const Problem& x, const FlatTensor& g, const FlatTensor& beta, const RunBlock& c) {
  RawGates gates;
  if (c.lane / 4 < c.count) {
    gates.g = load_raw(g, x.in.precond_g, x, c);
    gates.beta = load_raw(beta, x.in.precond_beta, x, c);
  }
  return gates;
}
// key(r, x): as put_run().
template <int kN, class Key>
FW_DEVICE RunGates make_gates(const Problem& x, const RawGates& raw, int lane, Key&& key) {
  float squares[kRunTokens];
#pragma unroll
  for (int r = 0; r < kRunTokens; ++r) {
    float k[kN];
    key(r, k);
    squares[r] = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) squares[r] = fmaf(k[j], k[j], squares[r]);
  }
  return run_gates(x.rule, value_of_bits(x.in.precond_g.bf16 != 0, raw.g),
                   value_of_bits(x.in.precond_beta.bf16 != 0, raw.beta), sum_run(squares, lane));
}

template <int kN>
FW_DEVICE RunGates make_gates(const Problem& x, const RawGates& raw, const RunRows<kN>& k, int lane) {
  return make_gates<kN>(x, raw, lane, [&](int r, float(&row)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) row[j] = k[r][j];
  });
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

// This lane's channels of row `row` of floats [rows, K]; 0 past K.
template <int kN>
FW_DEVICE void load_lane(const float* rows, int64_t row, int channel, int K, float (&x)[kN]) {
  const float* const from = rows + row * K;
  if (K == 32 * kN) return load_wide<kN>(reinterpret_cast<const char*>(from + channel), x);
  load_channels({reinterpret_cast<char*>(const_cast<float*>(from)), 0, 0}, 0, channel, K, x);
}
template <int kN>
FW_DEVICE void store_lane(float* rows, int64_t row, int channel, int K, const float (&x)[kN]) {
  float* const to = rows + row * K;
  if (K == 32 * kN) return store_wide<kN>(reinterpret_cast<char*>(to + channel), 0, x);
  store_channels({reinterpret_cast<char*>(to), 0, 0}, 0, channel, K, x);
}
FW_DEVICE float load_precond(const StateArg& a, int64_t n, int h, int channel) {
  if (a.data == nullptr || n < 0) return 0;
  const int64_t at = n * a.stride_n + h * a.stride_h + channel * a.stride_k;
  return a.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.data)[at]) : static_cast<const float*>(a.data)[at];
}
FW_DEVICE void store_precond(const StateArg& a, int64_t n, int h, int channel, float x) {
  if (a.data == nullptr || n < 0) return;
  const int64_t at = n * a.stride_n + h * a.stride_h + channel * a.stride_k;
  if (a.bf16 != 0) {
    static_cast<uint16_t*>(a.data)[at] = bf16_bits(x);
  } else {
    static_cast<float*>(a.data)[at] = x;
  }
}

// Walks over the chunks of a sequence, from the first or from the last: x = a[c] x + b[c], and leaves the x before
// every step. A block has 32 channels of one key head; the steps themselves are one warp's, while the others load the
// next chunks and take away what the last have left.
struct ChunkWalk {
  const float* a;  // [chunks, H]
  const float* b;  // [chunks, H, K]
  float* before;   // [chunks, H, K]
  StateArg from, to;
  SlotArg slots;
  CheckpointArg checkpoints;  // of x, from the first chunk on
};
inline constexpr int kWalkThreads = 256, kWalkWarps = kWalkThreads / 32, kWalkChunks = 64,
                     kWalkEach = kWalkChunks / kWalkWarps, kWalkSteps = 16;
// In shared memory: what a round of chunks takes, and in place of b what it leaves.
struct WalkRound {
  float a[kWalkChunks], b[kWalkChunks][32];
};

// The first `count` steps of a round. They are taken from registers, the next ones being on their way: a store between
// them would hold up these.
FW_DEVICE void walk_round(WalkRound& round, int count, int lane, float& x) {
  constexpr int kParts = kWalkChunks / kWalkSteps;
  float a[2][kWalkSteps], b[2][kWalkSteps];
  const auto load = [&](int part) {
#pragma unroll
    for (int i = 0; i < kWalkSteps; ++i)
      a[part % 2][i] = round.a[kWalkSteps * part + i], b[part % 2][i] = round.b[kWalkSteps * part + i][lane];
  };
  load(0);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (kWalkSteps * part >= count) return;
    if (part + 1 < kParts) load(part + 1);
#pragma unroll
    for (int i = 0; i < kWalkSteps; ++i) {
      round.b[kWalkSteps * part + i][lane] = x;
      if (kWalkSteps * part + i < count) x = fmaf(a[part % 2][i], x, b[part % 2][i]);
    }
  }
}

template <Direction kDirection>
__global__ void __launch_bounds__(kWalkThreads) chunk_walk_kernel(const __grid_constant__ SequenceArg sequences, int H,
                                                                  int K, const __grid_constant__ ChunkWalk walk) {
  WalkRound* const rounds = reinterpret_cast<WalkRound*>(shared_memory());  // of two, in turns
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int groups = (K + 31) / 32;
  const int64_t item = block_index_x() / static_cast<unsigned>(groups);
  const int n = static_cast<int>(item / H), h = static_cast<int>(item % H);
  const int channel = static_cast<int>(block_index_x() % static_cast<unsigned>(groups)) * 32 + lane;
  const int slot = start_slot(walk.slots, n);
  // the next kernel reads inputs ahead, as those of this pass before this one do, and the boundaries after its wait
  grid_dependency_launch_first();
  grid_dependency_wait();
  if (skips(walk.slots, slot)) return;
  const int64_t first = first_chunk(sequences, n);
  const int chunks = chunk_count(sequences, n);
  const auto index = [&](int i) { return (first + (kDirection == Direction::kReverse ? chunks - 1 - i : i)) * H + h; };
  float next_a[kWalkEach], next_b[kWalkEach];
  const auto load = [&](int done) {
#pragma unroll
    for (int i = 0; i < kWalkEach; ++i) {
      const int at = done + warp + i * kWalkWarps;
      next_a[i] = next_b[i] = 0;
      if (at < chunks && channel < K) next_b[i] = walk.b[index(at) * K + channel];
      if (at < chunks && lane == 0) next_a[i] = walk.a[index(at)];
    }
  };
  // x before chunk `done` of the sequence.
  const auto keep_checkpoint = [&](int done, float state) {
    const int to = done > 0 ? checkpoint_after(walk.checkpoints, n, done * kChunk) : -1;
    if (to >= 0) store_precond(walk.checkpoints.states, to, h, channel, state);
  };
  // A warp takes away the rows that it loads: nothing waits for that.
  const auto leave = [&](int done, const WalkRound& round) {
#pragma unroll
    for (int i = 0; i < kWalkEach; ++i) {
      const int at = warp + i * kWalkWarps;
      if (done + at >= chunks || channel >= K) continue;
      walk.before[index(done + at) * K + channel] = round.b[at][lane];
      if (walk.checkpoints.states.data != nullptr) keep_checkpoint(done + at, round.b[at][lane]);
    }
  };
  load(0);
  float x = warp == 0 && channel < K ? load_precond(walk.from, slot, h, channel) : 0.0f;
  int done = 0;
  FW_NO_UNROLL
  for (; done < chunks; done += kWalkChunks) {
    WalkRound& round = rounds[done / kWalkChunks % 2];
#pragma unroll
    for (int i = 0; i < kWalkEach; ++i) {
      const int at = warp + i * kWalkWarps;
      round.b[at][lane] = next_b[i];
      if (lane == 0) round.a[at] = next_a[i];
    }
    sync_threads();
    load(done + kWalkChunks);
    if (warp == 0) walk_round(round, chunks - done, lane, x);
    if (done > 0) leave(done - kWalkChunks, rounds[(done / kWalkChunks + 1) % 2]);
  }
  sync_threads();
  if (done > 0) leave(done - kWalkChunks, rounds[(done / kWalkChunks + 1) % 2]);
  if (warp != 0 || channel >= K) return;
  store_precond(walk.to, end_slot(walk.slots, n), h, channel, x);
  if (walk.checkpoints.states.data != nullptr && sequence_length(sequences, n) == chunks * kChunk)
    keep_checkpoint(chunks, x);
}

template <Direction kDirection>
void walk_chunks(const Problem& x, const ChunkWalk& walk, void* stream) {
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) * x.H * ((x.K + 31) / 32))};
  launch_overlapped(chunk_walk_kernel<kDirection>, grid, kWalkThreads, 2 * sizeof(WalkRound), stream, x.sequences, x.H,
                    x.K, walk);
}

}  // namespace fw::cuda
