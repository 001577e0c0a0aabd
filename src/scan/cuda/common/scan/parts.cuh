// What the scans of the chunk form share. A block owns 64 value columns of one value head of one sequence. Four of its
// warps keep the transposed state [64 values, kTileK] in registers, as fragments of 16 value rows a warp
// (gpu/sm80/fragments.cuh). Value columns of different blocks never meet. All 16-bit tiles in shared memory are SW128
// tiles.
#pragma once

#include "gpu/launch.h"
#include "gpu/sm80/fragments.cuh"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/tiles.h"

namespace fw::cuda {

// Sequence, value head and value block of this block: blocks of one head are neighbours, so that the second one finds
// the chunk tiles in L2.
struct ScanCoord {
  int n, hv, value_block;
  bool map;  // the block is one of `maps` that follow the value blocks, number value_block of those
  int32_t length, chunks;
  int64_t first_tile;  // index of (first chunk, hv); a chunk further is HV further
};

// The grid of a scan with so many blocks of values, and of maps, a head.
inline Dim3 scan_grid(const SequenceArg& sequences, int HV, int blocks) {
  return {static_cast<unsigned>(sequences.N) * static_cast<unsigned>(HV) * static_cast<unsigned>(blocks), 1, 1};
}

FW_DEVICE ScanCoord scan_coord(const SequenceArg& sequences, int HV, int values, int maps) {
  const int head = static_cast<int>(block_index_x()) / (values + maps),
            block = static_cast<int>(block_index_x()) % (values + maps);
  ScanCoord p{head / HV, head % HV, block < values ? block : block - values, block >= values, 0, 0, 0};
  p.length = sequence_length(sequences, p.n);
  p.chunks = chunk_count(sequences, p.n);
  p.first_tile = static_cast<int64_t>(first_chunk(sequences, p.n)) * HV + p.hv;
  return p;
}

// ---- Tiles of raw rows: by the first kThreads threads ------------------------------------------------------------------------

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

// Thread i fills 8 columns of rows i / 8, i / 8 + kThreads / 8, ... of chunk c; what lies outside the tensor is 0.
// Of wide rows of bf16, asynchronously:
template <int kThreads = 64>
FW_DEVICE void copy_tile(const TileRows& t, int c, char* sw128) {
  const int i = static_cast<int>(thread_index()), piece = i % 8, row = i / 8;
  const int column = t.column + piece * 8, token = c * kChunk + row;
  char* to = sw128 + row * 128 + (((piece ^ row) & 7) * 16);
  const char* from = t.rows.data + (token * t.rows.stride + column) * 2;
  constexpr int kStep = kThreads / 8, kRows = kChunk / kStep;
  FW_UNROLL
  for (int j = 0; j < kRows; ++j) {
    const bool valid = token + j * kStep < t.length && column < t.V;
    cp_async_16(shared_address(to + j * kStep * 128), valid ? from + j * 2 * kStep * t.rows.stride : t.rows.data,
                valid);
  }
}
// Of any; returns whether that is asynchronous.
template <int kThreads = 64>
FW_DEVICE bool fill_tile(const TileRows& t, int c, char* sw128) {
  constexpr int kStep = kThreads / 8, kRows = kChunk / kStep;
  if (t.wide && t.rows.bf16 != 0) {
    copy_tile<kThreads>(t, c, sw128);
    return true;
  }
  const int i = static_cast<int>(thread_index()), piece = i % 8, row = i / 8;
  const int column = t.column + piece * 8, token = c * kChunk + row;
  char* to = sw128 + row * 128 + (((piece ^ row) & 7) * 16);
  if (t.wide) {
    const float* from = reinterpret_cast<const float*>(t.rows.data) + token * t.rows.stride + column;
    float4 x[2 * kRows] = {};  // of all rows: so many loads are on their way together
    FW_UNROLL
    for (int j = 0; j < 2 * kRows; ++j) {
      if (token + j / 2 * kStep < t.length && column < t.V)
        x[j] = *reinterpret_cast<const float4*>(from + j / 2 * kStep * t.rows.stride + j % 2 * 4);
    }
    FW_UNROLL
    for (int j = 0; j < kRows; ++j) {
      const float4 low = x[2 * j], high = x[2 * j + 1];
      *reinterpret_cast<uint4*>(to + j * kStep * 128) = make_uint4(
          pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
    }
  } else {
    FW_NO_UNROLL
    for (int j = 0; j < kRows; ++j) {
      float x[8] = {};
      if (t.rows.data != nullptr && token + j * kStep < t.length)
        load_channels(t.rows, token + j * kStep, column, t.V, x);
      *reinterpret_cast<uint4*>(to + j * kStep * 128) =
          make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
  }
  return false;
}
// SW128 tiles of the rows of a head of a tensor with K channels, of which copy_tile() can take 16 bytes at a time;
// zeros after them.
template <int kTileK, int kThreads = 64>
FW_DEVICE void copy_rows(const TokenArg& a, const SequenceArg& sequences, const ScanCoord& coord, int c, int K,
                         char* sw128_tiles) {
  const TileRows rows{rows_of(a, sequences, coord.n, coord.hv), coord.length, 0, K, true};
  FW_UNROLL
  for (int sw128 = 0; sw128 < kTileK / 64; ++sw128) {
    TileRows part = rows;
    part.column = 64 * sw128;
    copy_tile<kThreads>(part, c, sw128_tiles + sw128 * kSw128Bytes);
  }
}

// Of rows of any kind.
template <int kTileK, int kThreads = 64>
FW_DEVICE void fill_rows(const TokenArg& tensor, const SequenceArg& sequences, const ScanCoord& coord, int c, int K,
                         char* sw128_tiles) {
  TileRows rows = tile_rows(tensor, sequences, coord, K);
  FW_UNROLL
  for (int sw128 = 0; sw128 < kTileK / 64; ++sw128) {
    rows.column = 64 * sw128;
    fill_tile<kThreads>(rows, c, sw128_tiles + sw128 * kSw128Bytes);
  }
}

// ---- Z and W of a chunk, transposed, as accumulators ---------------------------------------------------------------------------

// Z^T = z_scale (.) tile^T, of 2 kN tokens.
template <int kN>
FW_DEVICE void load_z(float (&w)[kN], uint32_t sw128, const float* z_scale) {
  FW_UNROLL
  for (int k = 0; k < kN / 8; ++k) {
    uint32_t r[4];
    load_token_fragment(r, sw128, k);
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      w[8 * k + 2 * i] = bf16_low(r[i]);
      w[8 * k + 2 * i + 1] = bf16_high(r[i]);
    }
  }
  scale_columns(w, z_scale);
}

// z += scale (.) w, by columns.
template <int kN>
FW_DEVICE void add_scaled(float (&z)[kN], const float* scale, const float (&w)[kN]) {
  const float* mine = scale + 2 * (lane_index() % 4);
  FW_UNROLL
  for (int j = 0; j < kN / 4; ++j) {
    const float2 s = *reinterpret_cast<const float2*>(mine + 8 * j);
    z[4 * j] += s.x * w[4 * j];
    z[4 * j + 1] += s.y * w[4 * j + 1];
    z[4 * j + 2] += s.x * w[4 * j + 2];
    z[4 * j + 3] += s.y * w[4 * j + 3];
  }
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
            v = p.value_block * kValueBlock + 16 * warp_in_group() + static_cast<int>(lane_index()) / 4;
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
  const int first = 2 * (static_cast<int>(lane_index()) % 4) - p.value_block * kValueBlock - 16 * warp_in_group() -
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
  // Its slot, once it is reached; -1: nowhere. After the last chunk of a segment that is not the sequence's last, the
  // next one has it.
  FW_DEVICE int next(const CheckpointArg& a, const ScanCoord& p, int c) {
    until = a.chunks;
    const int n = a.sequence_of != nullptr ? a.sequence_of[p.n] : p.n, done = first + c + 1;
    if ((c + 1) * kChunk > p.length || (c + 1 == p.chunks && done != chunk_count(a.whole, n))) return -1;
    return checkpoint_index(a, n, done / a.chunks - 1);
  }
};

}  // namespace fw::cuda
