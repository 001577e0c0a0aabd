// What the two scans of the chunk form share. A block of 256 threads owns 64 value columns of one value head of one
// sequence. It keeps the transposed state [64 values, kTileK] in the registers of warps 4 to 7 ("the state's warps").
// Value columns of different blocks never meet. Warps 0 and 1 load the chunks' stages into shared memory, warps 2 and 3
// take what leaves it.
//
// All 16-bit tiles in shared memory are SW128 tiles (tiles.h). Lanes of the state's warps hold fragments of wgmma: of
// 16 value rows per warp and 16 columns, as wgmma.cuh describes them.
#pragma once

#include "scan/cuda/call/kernels.h"
#include "scan/cuda/call/tiles.h"
#include "scan/cuda/machine/ptx.cuh"
#include "scan/cuda/machine/tokens.cuh"

namespace fw::cuda {

inline constexpr unsigned kScanThreads = 256;
inline constexpr unsigned kStoreThread = 64, kStateThread = 128;  // the first threads of their parts; loads begin at 0
inline constexpr int kStateThreads = 128;
inline constexpr int kScanSharedLimit = 227 * 1024;
inline constexpr int kScanBarrierBytes = 256;

constexpr int round_to_sw128(int bytes) { return (bytes + 1023) / 1024 * 1024; }

// The place in a ring of buffers and the parity of its round.
template <int kDepth>
struct Ring {
  int slot = 0, parity = 0;
  FW_DEVICE void next() {
    if (++slot == kDepth) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Buffers of one kind on their way from those that fill them to those that empty them.
template <int kDepth>
struct RingBarriers {
  uint64_t full[kDepth], empty[kDepth];
  // How many threads say so.
  FW_DEVICE void init(int fillers, int emptiers) {
    for (int i = 0; i < kDepth; ++i) {
      mbarrier_init(full + i, fillers);
      mbarrier_init(empty + i, emptiers);
    }
  }
  FW_DEVICE void wait_full(const Ring<kDepth>& ring) { mbarrier_wait(full + ring.slot, ring.parity); }
  FW_DEVICE void wait_empty(const Ring<kDepth>& ring) { mbarrier_wait(empty + ring.slot, ring.parity ^ 1); }
  // By each of the threads, for itself: racecheck does not see that one lane's arrival after sync_warp() is for what
  // the others did.
  FW_DEVICE void put_full(const Ring<kDepth>& ring) { mbarrier_arrive(full + ring.slot); }
  FW_DEVICE void put_empty(const Ring<kDepth>& ring) { mbarrier_arrive(empty + ring.slot); }
};

// Sequence, value head and value block of this block: blocks of one head are neighbours, so that the second one finds
// the chunk tiles in L2.
struct ScanCoord {
  int n, hv, value_block;
  bool map;  // the block is one of `maps` that follow the value blocks, number value_block of those
  int32_t length, chunks;
  int64_t first_tile;  // index of (first chunk, hv); a chunk further is HV further
};

FW_DEVICE ScanCoord scan_coord(const SequenceArg& sequences, int HV, int values, int maps) {
  const int head = static_cast<int>(block_index_x()) / (values + maps),
            block = static_cast<int>(block_index_x()) % (values + maps);
  ScanCoord p{head / HV, head % HV, block < values ? block : block - values, block >= values, 0, 0, 0};
  p.length = sequence_length(sequences, p.n);
  p.chunks = chunk_count(sequences, p.n);
  p.first_tile = static_cast<int64_t>(first_chunk(sequences, p.n)) * HV + p.hv;
  return p;
}

// ---- Tiles of raw rows: by the 64 threads of warps 0 and 1 -------------------------------------------------------------------

// Rows of one sequence and value head, the 64 columns from `column` on.
struct TileRows {
  Rows rows;
  int32_t length, column, V;
  bool wide;  // rows lie at multiples of 16 bytes, V is a multiple of 8
};

FW_DEVICE TileRows tile_rows(const TokenArg& a, const SequenceArg& sequences, const ScanCoord& p, int V) {
  const Rows rows = rows_of(a, sequences, p.n, p.hv);
  const bool wide = rows.data != nullptr && V % 8 == 0 && rows.stride % (rows.bf16 != 0 ? 8 : 4) == 0 &&
                    (reinterpret_cast<uintptr_t>(rows.data) & 15) == 0;
  return {rows, p.length, p.value_block * kValueBlock, V, wide};
}

// Thread i fills 8 columns of rows i / 8, i / 8 + 8, ... of chunk c; what lies outside the tensor is 0.
// Of wide rows of bf16, asynchronously:
FW_DEVICE void copy_tile(const TileRows& t, int c, char* sw128) {
  const int i = static_cast<int>(thread_index()), piece = i % 8, row = i / 8;
  const int column = t.column + piece * 8, token = c * kChunk + row;
  char* to = sw128 + row * 128 + ((piece ^ row) * 16);
  const char* from = t.rows.data + (token * t.rows.stride + column) * 2;
  FW_UNROLL
  for (int j = 0; j < 8; ++j) {
    const bool valid = token + j * 8 < t.length && column < t.V;
    cp_async_16(shared_address(to + j * 1024), valid ? from + j * 16 * t.rows.stride : t.rows.data, valid);
  }
}
// Of any; returns whether that is asynchronous.
FW_DEVICE bool fill_tile(const TileRows& t, int c, char* sw128) {
  if (t.wide && t.rows.bf16 != 0) {
    copy_tile(t, c, sw128);
    return true;
  }
  const int i = static_cast<int>(thread_index()), piece = i % 8, row = i / 8;
  const int column = t.column + piece * 8, token = c * kChunk + row;
  char* to = sw128 + row * 128 + ((piece ^ row) * 16);
  if (t.wide) {
    const float* from = reinterpret_cast<const float*>(t.rows.data) + token * t.rows.stride + column;
    float4 x[16] = {};  // of all rows: so many loads are on their way together
    FW_UNROLL
    for (int j = 0; j < 16; ++j) {
      if (token + j / 2 * 8 < t.length && column < t.V)
        x[j] = *reinterpret_cast<const float4*>(from + j / 2 * 8 * t.rows.stride + j % 2 * 4);
    }
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float4 low = x[2 * j], high = x[2 * j + 1];
      *reinterpret_cast<uint4*>(to + j * 1024) = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w),
                                                            pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
    }
  } else {
    FW_NO_UNROLL
    for (int j = 0; j < 8; ++j) {
      float x[8] = {};
      if (t.rows.data != nullptr && token + j * 8 < t.length) load_channels(t.rows, token + j * 8, column, t.V, x);
      *reinterpret_cast<uint4*>(to + j * 1024) =
          make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
  }
  return false;
}
// And arrives once.
FW_DEVICE void issue_tile(const TileRows& t, int c, char* sw128, uint64_t* full) {
  if (fill_tile(t, c, sw128)) {
    cp_async_arrive(full);
  } else {
    mbarrier_arrive(full);
  }
}

// ---- Fragments: by the state's warps -------------------------------------------------------------------------------------------

FW_DEVICE int state_warp() { return static_cast<int>(warp_index()) & 3; }

// Byte of a SW128 tile [64 tokens, 64 values] that this lane names to ldmatrix or stmatrix (transposed) for the
// fragment of the first 16 tokens of its warp's 16 values; 16 tokens further are 2048 bytes.
FW_DEVICE int token_fragment_offset() {
  const int matrix = static_cast<int>(lane_index()) / 8, r = static_cast<int>(lane_index()) % 8;
  return ((matrix / 2) * 8 + r) * 128 + (((2 * state_warp() + matrix % 2) ^ r) * 16);
}

FW_DEVICE void load_token_fragment(uint32_t (&r)[4], uint32_t sw128, int k) {
  ldmatrix_x4_trans(r, sw128 + static_cast<uint32_t>(token_fragment_offset() + k * 2048));
}

FW_DEVICE void store_token_fragment(uint32_t sw128, int k, const uint32_t (&r)[4]) {
  stmatrix_x4_trans(sw128 + static_cast<uint32_t>(token_fragment_offset() + k * 2048), r);
}

// What this lane names to stmatrix of SW128 tiles of 64 rows (of a state values, of O tokens) for the fragment of its
// warp's 16 rows and columns 16 k to 16 k + 15.
FW_DEVICE uint32_t state_fragment(uint32_t sw128_tiles, int k) {
  const int matrix = static_cast<int>(lane_index()) / 8,
            row = 16 * state_warp() + (matrix % 2) * 8 + static_cast<int>(lane_index()) % 8;
  const int piece = (2 * (k % 4) + matrix / 2) ^ (row & 7);
  return sw128_tiles + static_cast<uint32_t>(k / 4 * kSw128Bytes + row * 128 + piece * 16);
}
FW_DEVICE void store_state_fragment(uint32_t sw128_tiles, int k, const uint32_t (&r)[4]) {
  stmatrix_x4(state_fragment(sw128_tiles, k), r);
}

template <int kN>
FW_DEVICE void pack_fragments(const float (&d)[kN], uint32_t (&a)[kN / 8][4]) {
  FW_UNROLL
  for (int k = 0; k < kN / 8; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
  }
}

// What that leaves out.
template <int kN>
FW_DEVICE void pack_lo_parts(const float (&d)[kN], const uint32_t (&a)[kN / 8][4], uint32_t (&lo_parts)[kN / 8][4]) {
  FW_UNROLL
  for (int k = 0; k < kN / 8; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) lo_parts[k][i] = pack_lo(a[k][i], d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
  }
}

// Column j of the accumulators times scale[j].
template <int kN>
FW_DEVICE void scale_columns(float (&d)[kN], const float* scale) {
  const float* mine = scale + 2 * (lane_index() % 4);
  FW_UNROLL
  for (int j = 0; j < kN / 4; ++j) {
    const float2 s = *reinterpret_cast<const float2*>(mine + 8 * j);
    d[4 * j] *= s.x;
    d[4 * j + 1] *= s.y;
    d[4 * j + 2] *= s.x;
    d[4 * j + 3] *= s.y;
  }
}

// ---- Products: the state's warps issue them, see wgmma.cuh ---------------------------------------------------------------------

// The descriptor of what lies so many bytes further: cheaper than a new one.
FW_DEVICE uint64_t descriptor_after(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16));
}

// d [64, 64] = (or +=) a [64, kSteps 16] times the transpose of the SW128 tiles of b [64, kSteps 16].
template <int kSteps>
FW_DEVICE void multiply_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], uint32_t b, bool accumulate) {
  const uint64_t first = wgmma_descriptor(b, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k)
    wgmma_rs<64, false>(d, a[k], descriptor_after(first, k / 4 * kSw128Bytes + k % 4 * 32), accumulate || k > 0);
}

// d [64, 64] = (or +=) a [64, 64 tokens] times the SW128 tile of b [64 tokens, 64].
FW_DEVICE void multiply_outer(float (&d)[32], const uint32_t (&a)[4][4], uint32_t b, bool accumulate = false) {
  const uint64_t first = wgmma_descriptor(b, kSw128Bytes, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_rs<64, true>(d, a[k], descriptor_after(first, k * 2048), accumulate || k > 0);
}

// y += fragments of token columns times a scalar per token.
FW_DEVICE void add_fragments(float (&y)[32], const uint32_t (&x)[4][4], const float* numbers) {
  const float* mine = numbers + 2 * (lane_index() % 4);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(mine + 16 * k + 8 * (i / 2));
      y[8 * k + 2 * i] += f.x * bf16_low(x[k][i]), y[8 * k + 2 * i + 1] += f.y * bf16_high(x[k][i]);
    }
  }
}
// The same rounded, without y.
FW_DEVICE void scale_fragments(const uint32_t (&x)[4][4], const float* numbers, uint32_t (&y)[4][4]) {
  float sum[32] = {};
  add_fragments(sum, x, numbers);
  pack_fragments(sum, y);
}

// d [64, kTileK] += a [64, 64 tokens] times the SW128 tiles of b [64 tokens, kTileK].
template <int kTileK>
FW_DEVICE void add_outer(float (&d)[kTileK / 2], const uint32_t (&a)[4][4], uint32_t b) {
  const uint64_t first = wgmma_descriptor(b, kSw128Bytes, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_rs<kTileK, true>(d, a[k], descriptor_after(first, k * 2048), true);
}

// The same of operands with lo parts (LoTiles): a + a_lo times b, and a times what lies at b_lo, if that is there;
// without the product of two lo parts.
template <int kSteps>
FW_DEVICE void multiply_hi_lo_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], const uint32_t (&a_lo)[kSteps][4],
                                   uint32_t b, uint32_t b_lo, bool has_b_lo) {
  multiply_rows(d, a, b, false);
  multiply_rows(d, a_lo, b, true);
  if (has_b_lo) {
    wgmma_fence();  // here and below: where ways part and meet the compiler wants to see it
    multiply_rows(d, a, b_lo, true);
  }
  wgmma_fence();
}
template <int kTileK>
FW_DEVICE void add_hi_lo_outer(float (&d)[kTileK / 2], const uint32_t (&a)[4][4], const uint32_t (&a_lo)[4][4],
                               uint32_t b, uint32_t b_lo) {
  add_outer<kTileK>(d, a, b);
  add_outer<kTileK>(d, a_lo, b);
  add_outer<kTileK>(d, a, b_lo);
}

// ---- Fine chunk tiles: by the thread that loads stages ------------------------------------------------------------------------------

// Shape: of a stage: kLo and kKeysLo say where it has the lo parts of x (y) and of e (k), the scales lie after the
// chunk tile (kChunkTile): bytes.
template <int kTileK>
FW_DEVICE uint32_t lo_bytes(const HiLoTiles& hi_lo) {
  return static_cast<uint32_t>(sizeof(LoTiles<kTileK>) + (hi_lo.lo_parts != nullptr ? 64 * kTileK * 2 : 0));
}
template <class Shape, int kTileK>
FW_DEVICE void issue_lo_tiles(const HiLoTiles& hi_lo, int64_t tile, char* stage, uint64_t* full) {
  const auto& chunk_tile = static_cast<const LoTiles<kTileK>*>(hi_lo.chunk_tiles)[tile];
  bulk_load(stage + Shape::kLo, chunk_tile.lo, sizeof chunk_tile.lo, full);
  bulk_load(stage + Shape::kChunkTile, chunk_tile.scale, sizeof chunk_tile.scale, full);
  if (hi_lo.lo_parts != nullptr)
    bulk_load(stage + Shape::kKeysLo, hi_lo.lo_parts + tile * (64 * kTileK), 64 * kTileK * 2, full);
}

// ---- States ----------------------------------------------------------------------------------------------------------------------

// The element of state (n, hv) that accumulator i of this thread holds is (k, v); those outside of [K, V] are 0 and
// stay unread.
struct StateOffset {
  char* data;
  int64_t stride_k, stride_v;
  int32_t bf16;
  int K, V, k, v;  // k, v: of accumulator 0
};

FW_DEVICE StateOffset state_offset(const StateArg& a, const ScanCoord& p, int n, int K, int V) {
  const int64_t offset = n * a.stride_n + p.hv * a.stride_h;
  const int k = 2 * (static_cast<int>(lane_index()) % 4),
            v = p.value_block * kValueBlock + 16 * state_warp() + static_cast<int>(lane_index()) / 4;
  return {static_cast<char*>(a.data) + offset * (a.bf16 != 0 ? 2 : 4), a.stride_k, a.stride_v, a.bf16, K, V, k, v};
}

template <int kN>
FW_DEVICE void load_state(const StateArg& a, const ScanCoord& p, int n, int K, int V, float (&d)[kN]) {
  FW_UNROLL
  for (int i = 0; i < kN; ++i) d[i] = 0.0f;
  if (a.data != nullptr) n = state_slot(a, n);
  if (a.data == nullptr || n < 0) return;
  const StateOffset s = state_offset(a, p, n, K, V);
  FW_UNROLL
  for (int i = 0; i < kN; ++i) {
    const int k = s.k + i / 4 * 8 + i % 2, v = s.v + i % 4 / 2 * 8;
    if (k < K && v < V) {
      const int64_t at = k * s.stride_k + v * s.stride_v;
      d[i] = s.bf16 != 0 ? bf16_value(reinterpret_cast<const uint16_t*>(s.data)[at])
                         : reinterpret_cast<const float*>(s.data)[at];
    }
  }
}

// The unit matrix, of which this block has value columns.
template <int kN>
FW_DEVICE void unit_state(const ScanCoord& p, float (&d)[kN]) {
  const int first = 2 * (static_cast<int>(lane_index()) % 4) - p.value_block * kValueBlock - 16 * state_warp() -
                    static_cast<int>(lane_index()) / 4;
  FW_UNROLL
  for (int i = 0; i < kN; ++i) d[i] = first + i / 4 * 8 + i % 2 - i % 4 / 2 * 8 == 0 ? 1.0f : 0.0f;
}

template <class Number, class Store, int kN>
FW_DEVICE void store_elements(const StateOffset& s, const float (&d)[kN], const Store& store) {
  const bool low = s.v < s.V, high = s.v + 8 < s.V;
  const int64_t step = 8 * s.stride_k;
  Number* at = reinterpret_cast<Number*>(s.data) + s.k * s.stride_k + s.v * s.stride_v;
  Number* across = at + 8 * s.stride_v;
  FW_UNROLL
  for (int j = 0; j < kN / 4; ++j, at += step, across += step) {
    const bool first = s.k + 8 * j < s.K, second = s.k + 8 * j + 1 < s.K;
    if (first && low) store(at, d[4 * j]);
    if (second && low) store(at + s.stride_k, d[4 * j + 1]);
    if (first && high) store(across, d[4 * j + 2]);
    if (second && high) store(across + s.stride_k, d[4 * j + 3]);
  }
}
// n: -1: nowhere.
template <int kN>
FW_DEVICE void store_state(const StateArg& a, const ScanCoord& p, int n, int K, int V, const float (&d)[kN]) {
  if (a.data == nullptr || n < 0) return;
  n = state_slot(a, n);
  if (n < 0) return;
  const StateOffset s = state_offset(a, p, n, K, V);
  if (s.bf16 != 0) {
    store_elements<uint16_t>(s, d, [](uint16_t* at, float x) { *at = bf16_bits(x); });
  } else {
    store_elements<float>(s, d, [](float* at, float x) { *at = x; });
  }
}

// Chunks until the next checkpoint of a sequence or segment whose first chunk is number `first` of its sequence; 0:
// there is none.
struct CheckpointWalk {
  int first = 0, until = 0;

  FW_DEVICE CheckpointWalk(const CheckpointArg& a, const SequenceArg& sequences, const ScanCoord& p) {
    if (a.states.data == nullptr || p.map) return;
    if (a.sequence_of != nullptr) first = first_chunk(sequences, p.n) - first_chunk(a.whole, a.sequence_of[p.n]);
    until = a.chunks - first % a.chunks;
  }
  // Whether the state after chunk c is one; to be asked once a chunk, in order.
  FW_DEVICE bool reached() { return until != 0 && --until == 0; }
  // Its place, once it is reached; -1: nowhere. After the last chunk of a segment that is not the sequence's last, the
  // next one has it.
  FW_DEVICE int next(const CheckpointArg& a, const ScanCoord& p, int c) {
    until = a.chunks;
    const int n = a.sequence_of != nullptr ? a.sequence_of[p.n] : p.n, done = first + c + 1;
    if ((c + 1) * kChunk > p.length || (c + 1 == p.chunks && done != chunk_count(a.whole, n))) return -1;
    return checkpoint_index(a, n, done / a.chunks - 1);
  }
};

// ---- What leaves: by warps 2 and 3 -------------------------------------------------------------------------------------------------

// By one thread, when the buffer is full: copies it away; the buffer is empty when this returns.
FW_DEVICE void drain_bulk(uint16_t* to, const char* from, uint32_t bytes, uint64_t* empty) {
  bulk_store(to, from, bytes);
  bulk_commit();
  bulk_wait_read<0>();
  mbarrier_arrive(empty);
}
// By the same thread: of what it has drained, all but the last `kLeft` are in memory. One more of those for whoever
// counts.
template <int kLeft>
FW_DEVICE void count_drained(uint32_t* counter) {
  bulk_wait<kLeft>();
  fence_async_global();
  release_add_one(counter);
}

}  // namespace fw::cuda
