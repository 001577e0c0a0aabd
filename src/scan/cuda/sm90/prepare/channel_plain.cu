// prepare_channel for the most frequent rules: whole bf16 rows of q and k, streams that are q, k and k times scales per
// row. w may also be multiplied by M of a preconditioner, made here from A before the chunk. Or, with bf16 log-decays,
// e is multiplied by an erase gate of channels, and with it Z has gates of value channels. The same products as there,
// written so that three blocks and all of the code they run fit an SM and its instruction cache. Rows are a rolled loop
// over what was fetched, and decays are exponentials of bounded sums. The streams lie over what they are made of.
//
// With L the exponential of the sum over a row's block of 8 rows (one warp's) up to and including its own, of
// log-decays bounded from below:
//   reads, erase   L r, L e             up     w / L
//   near           w up to the end of its pair of blocks, of the first pair of each half of the chunk
//   keys           w up to the middle (first half) or the end of the chunk, by true decays once T and P are made
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       sums of decays, coefficients and streams of a warp's 8 rows (rows: fetched ahead by cp.async)
//   4, 7      decays of the second half and of the whole chunk; the factors of the near keys (4)
//   0 to 3    T from `erase` and `up`, then A = (I + T)^-1;   4 to 7   P from `reads` and `up`, then Z, if there is one
//   all       X and M
#include <algorithm>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/finish.cuh"

namespace fw::cuda {
namespace {

// log2 of the smallest decay of a token in T and P: 1 / L is at most exp(80). All of a warp's rows stay above it if
// their product does.
inline constexpr float kLowestPlainStep = -14.42695f;
// log2 of what every channel keeps of a warp's rows where X has the keys' lo parts too: of the chunk then more than a
// quarter (lasts() in finish.cuh). These rest in the memory of the chunk tile x until T and P are made.
inline constexpr float kLastingRows = kLastingChunk / 8;

// Decays by channel that outlast the sums: of blocks 0, 2, 4 and 6, of 4 and 5 (all bounded, as store_split() has
// them), and of the second half.
inline constexpr int kMiddleFactor = 4, kHalfFactor = 5;

// Shared memory. raw q becomes reads, raw k becomes up (then A and P), the log-decays as they lie in memory become
// erase (then T) and, if they are float32, keys (then x). Gates of key channels are where keys go. M of the chunk tiles
// overwrites near, and so do, before, the sums of decays of all blocks and, until there are bounded ones, what
// runs of rows make of A.
template <int kTileK>
struct PlainLayout {
  static constexpr bool kWideKey = kTileK == 128;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK;
  static constexpr uint32_t kReads = 0, kUp = kOperand, kErase = 2 * kOperand, kKeys = 3 * kOperand,
                            kNear = 4 * kOperand;
  static constexpr uint32_t kFactors = kNear + kOperand / 2, kRowsEnd = kFactors + 6 * kTileK * sizeof(float);
  static constexpr uint32_t kMore = (kRowsEnd + 1023) / 1024 * 1024;  // where operands are narrower than T, A and P
  static constexpr uint32_t kT = kWideKey ? kErase : kMore, kA = kUp,
                            kP = kWideKey ? kUp + kSw128Bytes : kMore + kTriangleBytes, kM = kWideKey ? kNear : kMore;
  static constexpr uint32_t kSums = kNear;
  // In place of kMiddleFactor, which is written last: of each warp, whether decays are bounded, and the product of
  // its preconditioner's decays.
  static constexpr uint32_t kEarly = kFactors + kMiddleFactor * kTileK * sizeof(float);
  static constexpr uint32_t kBytes = kWideKey ? kRowsEnd : kP + kSw128Bytes;
  static constexpr int kBlocks = 3;
  static_assert(kTriangleBytes <= (kWideKey ? kOperand : kTriangleBytes) && kP % 1024 == 0 && kM % 1024 == 0);
  static_assert(2 * 8 * kTileK * sizeof(float) <= kOperand / 2 && kBlocks * (kBytes + 1024) <= 228 * 1024);
};

template <int kTileK>
FW_DEVICE float* channel_factors(char* shared, int i) {
  return reinterpret_cast<float*>(shared + PlainLayout<kTileK>::kFactors) + i * kTileK +
         static_cast<int>(lane_index()) * (kTileK / 32);
}

// From row to row of a warp, offsets differ by XOR alone: 128 bytes a row and the row in the atom.
FW_DEVICE uint32_t row_step(int r) { return static_cast<uint32_t>(r) * 0x90u; }

// The log-decays of the chunk as they lie in memory: rows of 4 or 2 bytes a channel, in SW128 tiles from kErase on.
template <int kTileK, bool kNarrow>
struct RawDecays {
  static constexpr int kN = kTileK / 32, kSize = kNarrow ? 2 : 4;

  // Of this lane's channels of the warp's first row.
  FW_DEVICE static uint32_t lane_start() {
    if constexpr (kNarrow) {
      return lane_offset<kN>(0);
    } else {
      const int byte = static_cast<int>(lane_index()) * kN * 4;
      return atom_offset(static_cast<int>(warp_index()) * kWarpRows, byte >> 4) + static_cast<uint32_t>(byte & 15);
    }
  }
  FW_DEVICE static void load(const char* from, float (&g)[kN]) {
    if constexpr (kNarrow) {
      const PackedChannels<kN> packed = load_packed<kN>(from);
      FW_UNROLL
      for (int j = 0; j < kN / 2; ++j) g[2 * j] = bf16_low(packed.words[j]), g[2 * j + 1] = bf16_high(packed.words[j]);
    } else {
      load_floats(reinterpret_cast<const float*>(from), g);
    }
  }
};

// A warp's rows of a matrix of kAtoms 16-byte atoms a row on their way into SW128 tiles: a lane has a atom of every
// kRows-th row. K: channels that the tensor has; the others are zeros.
template <int kAtoms>
struct RowFetch {
  static constexpr int kRows = 32 / kAtoms;
  const char* from;
  int64_t step;
  uint32_t to;
  int row;

  FW_DEVICE RowFetch(const TokenArg& tensor, const ChunkCoord& coord, int K, int size, uint32_t matrix) {
    const int lane = static_cast<int>(lane_index()), atom = lane % kAtoms;
    row = static_cast<int>(warp_index()) * kWarpRows + lane / kAtoms;
    const int32_t token = static_cast<int32_t>(tensor.stride_t) * size;  // a chunk's rows are within 2^31 bytes
    from = row_address(tensor, coord, 0) + (row * token + atom * 16);
    step = token * kRows;
    to = matrix + atom_offset(row, atom);
    if (atom * 16 >= K * size) row = kChunk;
  }
  // The lane's row in rows r to r + kRows - 1 of the warp, in order from 0 on.
  FW_DEVICE void next(int r, int rows) {
    cp_async_16(to ^ row_step(r), from, row + r < rows);
    from += step;
  }
};
template <class Form>
FW_DEVICE void fetch_plain(const Problem& x, const ChunkCoord& coord, char* shared) {
  constexpr int kTileK = Form::kTileK, kAtoms = kTileK / 8, kSize = Form::Decays::kSize;
  constexpr bool kGates = Form::kGates;
  using Layout = PlainLayout<kTileK>;
  const uint32_t base = shared_address(shared);
  RowFetch<kAtoms> k(x.in.k, coord, x.K, 2, base + Layout::kUp), q(x.in.q, coord, x.K, 2, base + Layout::kReads);
  RowFetch<kAtoms * kSize / 2> g(x.in.g, coord, x.K, kSize, base + Layout::kErase);
  RowFetch<kAtoms> b(kGates ? x.in.erase_gate : x.in.k, coord, x.K, 2, base + Layout::kKeys);
  FW_UNROLL
  for (int r = 0; r < kWarpRows; r += k.kRows) {
    k.next(r, coord.span.rows);
    q.next(r, coord.span.rows);
    if constexpr (kGates) b.next(r, coord.span.rows);
    FW_UNROLL
    for (int i = 0; i < k.kRows; i += g.kRows) g.next(r + i, coord.span.rows);
  }
  cp_async_commit();
}

// Values in place of logits, by the lane that reads them later (FusedGates); what lies past the channels and the
// rows stays 0.
template <int kTileK, bool kGates>
FW_DEVICE void form_rows(const Problem& x, const ChunkCoord& coord, int warp, char* shared) {
  using Layout = PlainLayout<kTileK>;
  constexpr int kN = kTileK / 32;
  const FusedGates& fused = x.fused;
  const int channel = static_cast<int>(lane_index()) * kN, rows = coord.span.rows - warp * kWarpRows;
  if (fused.g.given == GateActivation::kValue || channel >= x.K) return;
  const uint32_t start = lane_offset<kN>(0);
  const GateScalars<kN> numbers = gate_scalars<kN>(fused.a_log, fused.dt_bias, coord.hv, channel);
  with_decay_law(fused.g, [&](auto sigmoid) {
    FW_NO_UNROLL
    for (int r = 0; r < kWarpRows && r < rows; r += 2) {  // the second may be a row of zeros, which are put back
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        char* const at = shared + Layout::kErase + (start ^ row_step(r + i));
        PackedChannels<kN> g = load_packed<kN>(at);
        FW_UNROLL
        for (int j = 0; j < kN / 2; ++j) {
          const DecayLaw low(fused.g, numbers.bias[2 * j], numbers.rate[2 * j]),
              high(fused.g, numbers.bias[2 * j + 1], numbers.rate[2 * j + 1]);
          const uint32_t word = fused_decays<sigmoid.value>(low, high, g.words[j]);
          g.words[j] = r + i < rows ? word : 0;
        }
        store_packed(at, g);
        if constexpr (kGates) {  // of rows that are none nothing is made
          char* const gate_at = at + (Layout::kKeys - Layout::kErase);
          PackedChannels<kN> gates = load_packed<kN>(gate_at);
          FW_UNROLL
          for (int j = 0; j < kN / 2; ++j) gates.words[j] = fused_pair(fused.erase_gate.factor, gates.words[j]).values;
          store_packed(gate_at, gates);
        }
      }
    }
  });
}

// What a warp's rows have in common: decays of the blocks before them, from their block's start up to where keys go,
// and up to the end of their pair of blocks. As sums (log2) first.
template <int kN>
struct BlockDecays {
  float before[kN], keys[kN], near[kN];
};
template <int kTileK>
FW_DEVICE void block_sums(const float* sums, BlockDecays<kTileK / 32>& d) {
  constexpr int kN = kTileK / 32;
  const int warp = static_cast<int>(warp_index()), of_half = warp & 3;  // predicates of additions instead of branches
  sums += static_cast<int>(lane_index()) * kN;
  float x[kN];
  load_floats(sums + warp * kTileK, d.near);
  load_floats(sums + (warp | 1) * kTileK, x);
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    if ((warp & 1) == 0) d.near[j] += x[j];
    d.before[j] = d.keys[j] = 0;
  }
  FW_UNROLL
  for (int block = 0; block < 4; ++block) {
    load_floats(sums + ((warp & 4) + block) * kTileK, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      if (block < of_half) d.before[j] += x[j];
      if (block >= of_half) d.keys[j] += x[j];
    }
  }
  if (warp < 4) return;
  FW_UNROLL
  for (int block = 0; block < 4; ++block) {
    load_floats(sums + block * kTileK, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d.before[j] += x[j];
  }
}

// A channel factor of bf16 operands: a product with it is rounded once, as with SplitFactor. high, low: of two
// channels.
FW_DEVICE uint32_t times_pair(uint32_t x, const uint2& f) { return fma_bf16x2(x, f.x, mul_bf16x2(x, f.y)); }
template <int kN>
FW_DEVICE void store_split(float* to, const float (&f)[kN]) {
  FW_UNROLL
  for (int j = 0; j < kN; j += 2) {
    const uint32_t high = pack_bf16(f[j], f[j + 1]);
    *reinterpret_cast<uint2*>(to + j) = make_uint2(high, pack_lo(high, f[j], f[j + 1]));
  }
}

template <int kTileK>
using PlainTilesOut = ChunkTiles<kTileK, QETiles<kTileK>>;

// The row scales lane / 4 of the warp: factors of q, of k in the erase, and of k in the write.
struct PlainCoefs {
  float read = 0, erase = 0, write = 0;
};

// A and M of the preconditioner, of this lane's channels of the warp's rows. kLeaves: A goes to memory, if it is
// wanted.
template <int kTileK, bool kPrecond, bool kLeaves>
struct RowsOfM {};
template <int kTileK, bool kLeaves>
struct RowsOfM<kTileK, true, kLeaves> {
  static constexpr int kN = kTileK / 32;
  PrecondRows<kN> precond;
  float g = 0, beta = 0;  // of row lane / 4 ...
  RunGates gates;         // ... and what is made of them
  uint16_t* before;       // where A before the warp's next row goes ...
  int rows;               // ... and of how many rows

  FW_DEVICE static RunPointers<kN> runs(char* shared) {
    using Layout = PlainLayout<kTileK>;
    return {reinterpret_cast<float(*)[kTileK]>(shared + Layout::kSums + 8 * kTileK * sizeof(float)),
            reinterpret_cast<float*>(shared + Layout::kEarly) + 8};
  }
  // What is in memory is on its way.
  FW_DEVICE void load(const Problem& x, const ChunkCoord& coord, const PrecondMap<float>& form) {
    const int channel = static_cast<int>(lane_index()) * kN, first = static_cast<int>(warp_index()) * kWarpRows;
    const int own = first + static_cast<int>(lane_index()) / 4;
    precond.load(x, coord, form, nullptr);
    if (own < coord.span.rows)
      g = gate_of_row(x.in.precond_g, coord, own), beta = gate_of_row(x.in.precond_beta, coord, own);
    // Of the value heads of a key head, the first leaves A.
    const int64_t token = first_token(x.sequences, coord.n) + coord.span.first + first;
    if constexpr (!kLeaves) return;
    before = x.precond_rows + (token * x.H + coord.key_head) * x.K + channel;
    rows = x.precond_rows != nullptr && coord.hv == coord.key_head * x.group ? coord.span.rows - first : 0;
  }
  // Before the block's barrier, once the keys are there.
  FW_DEVICE void put(const Problem& x, float square, char* shared) {
    const RunPointers<kN> to = runs(shared);
    const char* keys = shared + PlainLayout<kTileK>::kUp;
    gates = run_gates(x.rule, g, beta, square);
    put_run<kN>(gates, static_cast<int>(warp_index()), static_cast<int>(lane_index()), to,
                [&](int r, float(&k)[kN]) { fetched_row(keys, r, k); });
  }
  // After it.
  FW_DEVICE void start(char* shared) {
    const RunPointers<kN> from = runs(shared);
    run_start<Direction::kForward, kN>(static_cast<int>(warp_index()), static_cast<int>(lane_index()), from, precond.a);
  }
  FW_DEVICE void next(int step, int row, const float (&k)[kN], float (&m)[kN]) {
    if constexpr (kLeaves) {
      if (row < rows) store_packed(before, pack_channels(precond.a));
      before += step;
    }
    precond.next(of_token(gates.alpha, row), of_token(gates.gain, row), k, m);
  }
};

struct PreparePlainTraits {
  int k_tile = 128;  // 64 or 128
  bool has_bf16_decays = true;
  bool has_precond = false;
  bool has_channel_gates = false;  // on e and z
  bool saves = false;              // Khat, A and P
};
template <PreparePlainTraits kTraits>
struct PlainForm {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kNarrow = kTraits.has_bf16_decays, kPrecond = kTraits.has_precond,
                        kGates = kTraits.has_channel_gates, kTraining = kTraits.saves;
  using Decays = RawDecays<kTileK, kNarrow>;
  using PrecondRows = RowsOfM<kTileK, kPrecond, kTraining>;
};

// The streams of the warp's rows, in place of what they are made of, and the chunk tiles q, e and (kTraining, kExact)
// Khat. Exact rows have no bounded decay; the others give the same bits where none has been so far. spare: of M,
// as true_keys() wants it. lasting: the keys' lo parts too.
template <class Form, RowDecays kDecays, int kTileK = Form::kTileK>
FW_DEVICE void plain_rows(int warp, const PlainCoefs& own, const BlockDecays<kTileK / 32>& f,
                          typename Form::PrecondRows& rows_of_m, const Problem& x, const MRows& spare, bool lasting,
                          char* shared, const PlainTilesOut<kTileK>& out) {
  using Layout = PlainLayout<kTileK>;
  using Decays = typename Form::Decays;
  constexpr int kN = kTileK / 32;
  constexpr bool kPrecond = Form::kPrecond, kGates = Form::kGates, kTraining = Form::kTraining,
                 kExact = kDecays == RowDecays::kExact;
  const uint32_t start = lane_offset<kN>(0), decay_start = Decays::lane_start();
  // SW128 tiles of 32 rows: those of the first pairs of blocks.
  const uint32_t to_near =
      Layout::kNear - (start >> 13) * 4096u - static_cast<uint32_t>((warp >> 1) * 2048 - (warp >> 2) * 2048);
  const int near_distance = opaque(static_cast<int>(to_near));
  const bool near = (warp & 2) == 0;
  float sum[kN], exact_sum[kExact ? 1 : kN], half[kTraining ? kN : 1];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) sum[j] = exact_sum[kExact ? 0 : j] = 0;
  if constexpr (kTraining) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) half[j] = 1;
    if (warp < 4) load_floats(channel_factors<kTileK>(shared, kHalfFactor), half);
  }
  FW_NO_UNROLL
  for (int pair = 0; pair < kWarpRows; pair += 2) {
    PackedChannels<kN> q_raw[2], k_raw[2], b_raw[2];
    float g[2][kN];
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = start ^ row_step(pair + i);
      q_raw[i] = load_packed<kN>(shared + Layout::kReads + at);
      k_raw[i] = load_packed<kN>(shared + Layout::kUp + at);
      if constexpr (kGates) b_raw[i] = load_packed<kN>(shared + Layout::kKeys + at);
      Decays::load(shared + Layout::kErase + (decay_start ^ row_step(pair + i)), g[i]);
    }
    sync_warp();  // other lanes' channels of these rows are overwritten
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = start ^ row_step(pair + i);
      const float c_r = shuffle(own.read, 4 * (pair + i)), c_e = shuffle(own.erase, 4 * (pair + i)),
                  c_w = shuffle(own.write, 4 * (pair + i));
      float q[kN], k[kN], b[kN], m[kN], reads[kN], erase[kN], up[kN], tile_q[kN], tile_e[kN], keys[kN];
      FW_UNROLL
      for (int j = 0; j < kN / 2; ++j) {
        q[2 * j] = bf16_low(q_raw[i].words[j]), q[2 * j + 1] = bf16_high(q_raw[i].words[j]);
        k[2 * j] = bf16_low(k_raw[i].words[j]), k[2 * j + 1] = bf16_high(k_raw[i].words[j]);
        if constexpr (kGates) b[2 * j] = bf16_low(b_raw[i].words[j]), b[2 * j + 1] = bf16_high(b_raw[i].words[j]);
      }
      if constexpr (kPrecond) {
        rows_of_m.next(x.H * x.K, pair + i, k, m);
        if (!kExact && pair + i < spare.rows)
          store_floats(const_cast<float*>(spare.first) + (pair + i) * static_cast<int64_t>(spare.stride), m);
      }
      FW_UNROLL
      for (int j = 0; j < kN; ++j) {
        if constexpr (kExact) {
          sum[j] = fmaf(g[i][j], kLog2E, sum[j]);
        } else {
          const float step = max(g[i][j], kLowestPlainStep / kLog2E);
          sum[j] = fmaf(step, kLog2E, sum[j]), exact_sum[j] = fmaf(g[i][j], kLog2E, exact_sum[j]);
        }
        const float decay = exp2_fast(sum[j]), inverse = exp2_fast(-sum[j]);
        const float r = c_r * q[j], e = kGates ? b[j] * (c_e * k[j]) : c_e * k[j],
                    w = kPrecond ? m[j] * (c_w * k[j]) : c_w * k[j];
        reads[j] = decay * r, erase[j] = decay * e, up[j] = inverse * w;
        if constexpr (kExact) {
          tile_q[j] = f.before[j] * reads[j], tile_e[j] = -(f.before[j] * erase[j]);
        } else {
          const float exact = exp2_fast(exact_sum[j]);
          tile_q[j] = f.before[j] * (exact * r), tile_e[j] = -(f.before[j] * (exact * e));
        }
        keys[j] = f.keys[j] * up[j];
      }
      store_packed(shared + Layout::kReads + at, pack_channels(reads));
      store_packed(shared + Layout::kErase + at, pack_channels(erase));
      store_packed(shared + Layout::kUp + at, pack_channels(up));
      const PackedChannels<kN> packed_keys = pack_channels(keys);
      store_packed(shared + Layout::kKeys + at, packed_keys);
      if constexpr (kExact) {
        if (lasting) store_packed(reinterpret_cast<char*>(out.solved->x) + at, pack_lo_parts(keys, packed_keys));
      }
      if (near) {
        float ends[kN];
        FW_UNROLL
        for (int j = 0; j < kN; ++j) ends[j] = f.near[j] * up[j];
        store_packed(shared + (at + static_cast<uint32_t>(near_distance)), pack_channels(ends));
      }
      store_packed(reinterpret_cast<char*>(out.forward->q) + at, pack_channels(tile_q));
      store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(tile_e));
      if constexpr (kTraining && kExact) {
        FW_UNROLL
        for (int j = 0; j < kN; ++j) keys[j] *= half[j];
        store_packed(reinterpret_cast<char*>(out.keys) + at, pack_channels(keys));
      }
    }
  }
}

// The lo parts of a warp's keys from where plain_rows() has left them, in place of its reads.
template <int kTileK>
FW_DEVICE void fetch_lo_parts(const PlainTilesOut<kTileK>& out, char* shared) {
  constexpr int kN = kTileK / 32;
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const uint32_t at = lane_offset<kN>(0) ^ row_step(r);
    store_packed(shared + PlainLayout<kTileK>::kReads + at,
                 load_packed<kN>(reinterpret_cast<const char*>(out.solved->x) + at));
  }
  fence_async_global();  // TMA writes x there
}

// A warp's log-decays, which may have been fused, to the buffer of the chunk tile x, before what is made of them comes
// over them.
template <int kTileK>
FW_DEVICE void keep_decays(const char* shared, const PlainTilesOut<kTileK>& out) {
  constexpr int kN = kTileK / 32;
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const uint32_t at = lane_offset<kN>(0) ^ row_step(r);
    store_packed(reinterpret_cast<char*>(out.solved->x) + at,
                 load_packed<kN>(shared + PlainLayout<kTileK>::kErase + at));
  }
}

// Of a chunk with a bounded decay, once T and P are made: the keys by true ones, by all warps, from memory. kForms: of
// what keep_decays() has kept.
template <int kTileK, bool kForms, bool kTraining>
FW_DEVICE void true_keys(const Problem& x, const ChunkCoord& coord, int warp, const PlainCoefs& own, const MRows& m_all,
                         char* shared, const PlainTilesOut<kTileK>& out) {
  using Layout = PlainLayout<kTileK>;
  constexpr int kN = kTileK / 32;
  const int channel = static_cast<int>(lane_index()) * kN, first = warp * kWarpRows;
  const Rows decays = chunk_rows(x.in.g, coord), raw = chunk_rows(x.in.k, coord);
  const auto load_decays = [&](int r, float(&g)[kN]) {
    if constexpr (kForms) {
      RawDecays<kTileK, true>::load(reinterpret_cast<const char*>(out.solved->x) + (lane_offset<kN>(0) ^ row_step(r)),
                                    g);
    } else {
      load_channels(decays, first + r, channel, x.K, g);
    }
  };
  float* const sums = reinterpret_cast<float*>(shared + Layout::kSums) + channel;
  float sum[kN], half[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) sum[j] = 0, half[j] = 1;
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows && first + r < coord.span.rows; ++r) {
    float g[kN];
    load_decays(r, g);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) sum[j] += g[j];
  }
  store_floats(sums + warp * kTileK, sum);
  sync_threads();
  FW_UNROLL
  for (int j = 0; j < kN; ++j) sum[j] = 0;
  FW_NO_UNROLL
  for (int block = warp + 1; block < (warp < 4 ? 4 : 8); ++block) {
    float y[kN];
    load_floats(sums + block * kTileK, y);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) sum[j] += y[j];
  }
  if (warp < 4) load_floats(channel_factors<kTileK>(shared, kHalfFactor), half);
  FW_NO_UNROLL
  for (int r = kWarpRows - 1; r >= 0; --r) {
    float g[kN], k[kN], m[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) g[j] = k[j] = 0;
    if (first + r < coord.span.rows) {
      load_decays(r, g);
      load_channels(raw, first + r, channel, x.K, k);
    }
    load_m(m_all, r, m);
    const float c_w = shuffle(own.write, 4 * r);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      k[j] = exp2_fast(sum[j] * kLog2E) * (m[j] * (c_w * k[j]));
      sum[j] += g[j];
    }
    const uint32_t at = lane_offset<kN>(0) ^ row_step(r);
    store_packed(shared + Layout::kKeys + at, pack_channels(k));
    if constexpr (kTraining) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) k[j] *= half[j];
      store_packed(reinterpret_cast<char*>(out.keys) + at, pack_channels(k));
    }
  }
  if constexpr (kForms) fence_async_global();  // TMA writes x there
}

// Tiles of 8 columns of the 16 rows of a pair of blocks. They are the columns of the pair, for an odd pair those of the
// pair before, and for a pair of the second half the first half of the chunk.
struct PlainTiles {
  float own[2][4], near[2][4], far[4][4];
};

template <int kTileK>
FW_DEVICE void plain_tiles(char* shared, uint32_t left_matrix, int pair, PlainTiles& c) {
  using Layout = PlainLayout<kTileK>;
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    FW_UNROLL
    for (int n = 0; n < 4; ++n) {
      c.far[n][i] = 0;
      if (n < 2) c.own[n][i] = c.near[n][i] = 0;
    }
  }
  const uint32_t base = shared_address(shared), right = b_fragment(base, 0, 0);
  const uint32_t left = a_fragment(base + left_matrix, 16 * pair, 0),
                 up = right + Layout::kUp + static_cast<uint32_t>(16 * pair * 128);
  const uint32_t near = right + Layout::kNear + static_cast<uint32_t>((pair >> 1) * 16 * 128),
                 far = right + Layout::kKeys;
  // Channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a step.
  const char* factors = shared + Layout::kFactors + 8 * (static_cast<int>(lane_index()) & 3);
  const char *odd_factors = factors + pair * kTileK * 4, *middle = factors + kMiddleFactor * kTileK * 4;
  FW_NO_UNROLL
  for (int half = 0; half < kTileK / 32; ++half) {
    const uint32_t column = static_cast<uint32_t>(half & 1) << 6, sw128 = static_cast<uint32_t>(half >> 1);
    const uint32_t left_at = (left ^ column) + sw128 * kSw128Bytes, up_at = (up ^ column) + sw128 * kSw128Bytes;
    const uint32_t near_at = (near ^ column) + sw128 * 4096u, far_at = (far ^ column) + sw128 * kSw128Bytes;
    FW_UNROLL
    for (uint32_t step = 0; step < 2; ++step) {
      const uint2 *odd_factor = reinterpret_cast<const uint2*>(odd_factors + 64 * step),
                  *middle_factor = reinterpret_cast<const uint2*>(middle + 64 * step);
      uint32_t a[4], b[4];
      ldmatrix_x4(a, left_at ^ (step << 5));
      ldmatrix_x4(b, up_at ^ (step << 5));
      const uint32_t high[4] = {a[0], a[1], a[2], a[3]};
      a[1] = times_pair(a[1], odd_factor[0]), a[3] = times_pair(a[3], odd_factor[4]);
      mma_bf16(c.own[0], a, b[0], b[1]);
      mma_bf16(c.own[1], high, b[2], b[3]);
      if ((pair & 1) != 0) {
        ldmatrix_x4(b, near_at ^ (step << 5));
        mma_bf16(c.near[0], a, b[0], b[1]);
        mma_bf16(c.near[1], a, b[2], b[3]);
      }
      if (pair >= 2) {
        if (pair == 3) {
          a[0] = times_pair(a[0], middle_factor[0]), a[1] = times_pair(a[1], middle_factor[0]);
          a[2] = times_pair(a[2], middle_factor[4]), a[3] = times_pair(a[3], middle_factor[4]);
        }
        FW_UNROLL
        for (int n = 0; n < 4; n += 2) {
          ldmatrix_x4(b, (far_at ^ (step << 5)) + static_cast<uint32_t>(8 * n * 128));
          mma_bf16(c.far[n], a, b[0], b[1]);
          mma_bf16(c.far[n + 1], a, b[2], b[3]);
        }
      }
    }
    odd_factors += 128, middle += 128;
  }
}

// Into T, by the warps of the first half, or P.
template <bool kStrict, class Store>
FW_DEVICE void store_tiles(int pair, PlainTiles& c, Store&& store) {
  FW_UNROLL
  for (int n = 0; n < 2; ++n) {
    cut_tile<kStrict>(n, c.own[n]);
    store(2 * pair + n, c.own[n]);
    if ((pair & 1) != 0) store(2 * pair - 2 + n, c.near[n]);
    if (pair >= 2) store(n, c.far[n]), store(n + 2, c.far[n + 2]);
  }
}

template <class Form>
__global__ void __launch_bounds__(kPrepareThreads, PlainLayout<Form::kTileK>::kBlocks)
    prepare_channel_plain_kernel(const __grid_constant__ PrepareArgs args,
                                 const __grid_constant__ PrecondMap<float> form) {
  constexpr int kTileK = Form::kTileK, kN = kTileK / 32;
  using Layout = PlainLayout<kTileK>;
  using Decays = typename Form::Decays;
  constexpr bool kPrecond = Form::kPrecond, kGates = Form::kGates, kTraining = Form::kTraining;
  constexpr bool kForms = Form::kNarrow && !kPrecond;  // tensors may be logits
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) {
    if constexpr (kPrecond) grid_dependency_wait();
    return;
  }
  const PlainTilesOut<kTileK> out = chunk_tiles_of<kTileK, QETiles<kTileK>>(args, coord.item);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp(), lane = static_cast<int>(lane_index());

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kUp, nullptr};
  fetch_plain<Form>(x, coord, shared);
  const int own_row = warp * kWarpRows + lane / 4;
  PlainGates gates = plain_gates(x, coord, own_row);
  typename Form::PrecondRows rows_of_m;
  if constexpr (kPrecond) {
    grid_dependency_wait();  // for A before the chunk (precond_forward); inputs were there before that began
    rows_of_m.load(x, coord, form);
  }
  front_arrived();
  if constexpr (kForms) form_rows<kTileK, kGates>(x, coord, warp, shared);

  PlainCoefs coefs;
  {
    float2 squares = make_float2(0, 0);
    if (uses_norms(x.rule)) squares = fetched_squares<kN, true>(raw);
    if constexpr (!kPrecond && !kGates) form_gates(x, coord, own_row, lane % 4 == 0, gates);
    if constexpr (kPrecond) rows_of_m.put(x, squares.y, shared);
    const FrontCoefs<float> c = plain_coefs(x, gates, squares.x, squares.y);
    if (own_row < coord.span.rows) coefs.read = c.r_q, coefs.erase = c.e_k, coefs.write = c.w_k;
    const float z_scale = kGates && out.z != nullptr ? 1.0f : c.z_v;
    if (lane % 4 == 0) out.forward->z_scale[own_row] = own_row < coord.span.rows ? z_scale : 0.0f;
  }
  float* const sums = reinterpret_cast<float*>(shared + Layout::kSums);
  float* const bounded_sums = sums + 8 * kTileK;
  uint32_t* const bounded_warps = reinterpret_cast<uint32_t*>(shared + Layout::kEarly);
  constexpr uint32_t kSmall = 1, kFades = 2;  // of a warp's decays: one may be bounded; a channel's rows do not last
  const auto sum_decays = [&](auto&& of, float* to) {
    const uint32_t start = Decays::lane_start();
    float sum[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) sum[j] = 0;
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      float g[kN];
      Decays::load(shared + Layout::kErase + (start ^ row_step(r)), g);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) sum[j] += of(g[j]);
    }
    bool small = false, fades = false;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      sum[j] *= kLog2E;
      small = small || !(sum[j] >= kLowestPlainStep), fades = fades || !(sum[j] > kLastingRows);
    }
    store_floats(to + warp * kTileK + lane * kN, sum);
    return (warp_ballot(small) != 0 ? kSmall : 0) | (warp_ballot(fades) != 0 ? kFades : 0);
  };
  // If a product of decays is small, one of them may be.
  const uint32_t decays_are = sum_decays([](float g) { return g; }, sums);
  bool bounded = (decays_are & kSmall) != 0;
  if (bounded) {
    bool below = false;
    FW_NO_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      float g[kN];
      Decays::load(shared + Layout::kErase + (Decays::lane_start() ^ row_step(r)), g);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) below = below || !(g[j] >= kLowestPlainStep / kLog2E);
    }
    bounded = warp_ballot(below) != 0;
  }
  if (lane == 0) bounded_warps[warp] = (bounded ? kSmall : 0) | (decays_are & kFades);
  sync_threads();
  bool lasting = false;
  {
    const uint4 low = *reinterpret_cast<const uint4*>(bounded_warps),
                high = *reinterpret_cast<const uint4*>(bounded_warps + 4);
    const uint32_t any = (low.x | low.y) | (low.z | low.w) | (high.x | high.y) | (high.z | high.w);
    bounded = (any & kSmall) != 0, lasting = (any & kFades) == 0;
  }
  if constexpr (kPrecond) rows_of_m.start(shared);
  BlockDecays<kN> f;
  block_sums<kTileK>(sums, f);
  if (warp == 4 || warp == 7) {  // true decays of the second half and of the chunk
    float decay[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) decay[j] = exp2_fast(warp == 4 ? f.keys[j] : f.before[j] + f.keys[j]);
    if (warp == 4) {
      store_floats(channel_factors<kTileK>(shared, kHalfFactor), decay);
    } else {
      store_floats(out.forward->gamma + lane * kN, decay);
    }
  }
  if (bounded) {
    if constexpr (kForms) keep_decays(shared, out);
    sync_threads();
    sum_decays([](float g) { return max(g, kLowestPlainStep / kLog2E); }, bounded_sums);
    sync_threads();
    BlockDecays<kN> of_bounded;
    block_sums<kTileK>(bounded_sums, of_bounded);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) f.keys[j] = of_bounded.keys[j], f.near[j] = of_bounded.near[j];
  }
  FW_UNROLL
  for (int j = 0; j < kN; ++j)
    f.before[j] = exp2_fast(f.before[j]), f.keys[j] = exp2_fast(f.keys[j]), f.near[j] = exp2_fast(f.near[j]);
  if ((warp & 1) == 0) {
    float own[kN];
    load_floats((bounded ? bounded_sums : sums) + warp * kTileK + lane * kN, own);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) own[j] = exp2_fast(own[j]);
    store_split(channel_factors<kTileK>(shared, warp >> 1), own);
  }
  sync_threads();
  if (warp == 4) store_split(channel_factors<kTileK>(shared, kMiddleFactor), f.near);
  const auto spare_m = [&] { return m_rows(x, kPrecond ? args.spare_m : nullptr, coord, lane * kN); };
  if (bounded) {
    plain_rows<Form, RowDecays::kBounded>(warp, coefs, f, rows_of_m, x, spare_m(), false, shared, out);
  } else {
    plain_rows<Form, RowDecays::kExact>(warp, coefs, f, rows_of_m, x, {}, lasting, shared, out);
  }
  sync_threads();

  // The two warps of one scheduler share its work evenly.
  const int pair = warp < 4 ? warp : 7 - warp;
  PlainTiles c;
  plain_tiles<kTileK>(shared, warp < 4 ? Layout::kErase : Layout::kReads, pair, c);
  sync_threads();  // T and P overwrite operands
  if (bounded) true_keys<kTileK, kForms, kTraining>(x, coord, warp, coefs, spare_m(), shared, out);
  clear_above(shared + Layout::kP);
  if (lasting) fetch_lo_parts<kTileK>(out, shared);
  if (warp < 4) {
    const TriangleRows triangle = triangle_rows(shared + Layout::kT, pair);
    store_tiles<true>(pair, c, [&](int n, const float(&tile)[4]) { store_tile(triangle, n, tile); });
    invert<false>(reinterpret_cast<float*>(shared + Layout::kT), shared + Layout::kA, {}, warp, [] {});
  } else {
    const uint32_t sw128 = sw128_rows(pair);
    store_tiles<false>(pair, c, [&](int n, const float(&tile)[4]) { store_tile(shared + Layout::kP, sw128, n, tile); });
    overlap_invert<false>();
  }

  if constexpr (kGates) {
    if (warp >= 4 && out.z != nullptr) {
      const Rows values = chunk_rows(x.in.v, coord), gates_of_values = chunk_rows(x.in.write_gate, coord);
      write_gated_values<4>(
          values, gates_of_values, x.fused.write_gate, coord.span.rows, x.V, [](int) { return 1.0f; }, out.z,
          thread - 128, 128);
    }
  }
  sync_threads();
  const SplitSw128 a{shared_address(shared + Layout::kA), 0}, p{shared_address(shared + Layout::kP), 0};
  if (warp < kTileK / 16) {
    const float* half =
        reinterpret_cast<const float*>(shared + Layout::kFactors) + kHalfFactor * kTileK + 16 * warp + (lane >> 2);
    const auto middle = [&](float(&y)[8][4]) {
      FW_UNROLL
      for (int n = 0; n < 4; ++n) y[n][0] *= half[0], y[n][1] *= half[0], y[n][2] *= half[8], y[n][3] *= half[8];
    };
    const uint32_t keys = shared_address(shared + Layout::kKeys);
    // Two calls, so that without lo parts there is no loop over parts.
    if (lasting) {
      transform_keys<false, false>(keys, nullptr, a, warp, middle, shared_address(shared + Layout::kReads));
    } else {
      transform_keys<false, false>(keys, nullptr, a, warp, middle);
    }
  }
  read_products<false>(p, a, shared + Layout::kM, warp);
  store_block([&](auto&& copy) {
    store_solved(out, shared + Layout::kKeys, shared + Layout::kM, copy);
    if constexpr (kTraining) {
      copy(out.pairs->a, shared + Layout::kA, kSw128Bytes);
      copy(out.pairs->p, shared + Layout::kP, kSw128Bytes);
    }
  });
}

template <PreparePlainTraits kTraits>
void launch_plain(const PrepareArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const auto kernel = prepare_channel_plain_kernel<PlainForm<kTraits>>;
  const Dim3 grid = prepare_grid(x, chunks);
  constexpr int kBytes = PlainLayout<kTraits.k_tile>::kBytes;
  if constexpr (kTraits.has_precond) {
    launch_overlapped(kernel, grid, kPrepareThreads, kBytes, stream, args, precond_map_of(x.rule));
  } else {
    launch(kernel, grid, kPrepareThreads, kBytes, stream, args, PrecondMap<float>{});
  }
}

}  // namespace

void prepare_channel_plain(const PrepareArgs& args, const PrepareChoice&, int k_tile, int64_t chunks, void* stream) {
  using Traits = PreparePlainTraits;
  const Rule& rule = args.problem.rule;
  with_constants(
      [&](auto small, auto bf16, auto saves) {
        constexpr int kTileK = small ? 64 : 128;
        if (channel_erase(rule)) {
          launch_plain<Traits{.k_tile = kTileK, .has_channel_gates = true, .saves = saves}>(args, chunks, stream);
        } else if (rule.uses_precond()) {
          launch_plain<Traits{.k_tile = kTileK, .has_bf16_decays = bf16, .has_precond = true, .saves = saves}>(
              args, chunks, stream);
        } else {
          launch_plain<Traits{.k_tile = kTileK, .has_bf16_decays = bf16, .saves = saves}>(args, chunks, stream);
        }
      },
      k_tile == 64, args.problem.in.g.bf16 != 0, args.keys != nullptr);
}

}  // namespace fw::cuda
