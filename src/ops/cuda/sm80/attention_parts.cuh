// What the kernels of attention without Hopper's instructions share: rows that come by cp.async and products by
// mma.sync. A block is the eight warps of the workers (ops/cuda/attention_parts.cuh) and has one tile of one head. What
// it walks over comes in blocks of rows into a ring of two stages, the next one while this one is computed.
//
// Above 128 channels a thread has registers for 128 sums, and a block has shared memory for half as many rows. Backward
// then gives a block 64 rows of a tile, and 16 rows to two warps, a pair: the same warp of both workers.
#pragma once

#include <type_traits>

#include "gpu/sw128_atoms.cuh"
#include "ops/cuda/attention_parts.cuh"

namespace fw::cuda {

// Heads of more than 128 channels are cut into parts of so many.
template <int kDim>
inline constexpr int kPart = std::min(kDim, 128);
template <int kDim>
inline constexpr bool kPaired = kDim > 128;
template <int kDim>
inline constexpr int kBackwardRows = kPaired<kDim> ? 64 : kAttentionRows;  // of a block

// Heads from channel `first` on.
FW_DEVICE TokenArg from_channel(const TokenArg& all, int first) {
  TokenArg part = all;
  part.data = static_cast<char*>(all.data) + first * 2;
  return part;
}

// kCount rows row, row + 1, ... of a tensor's head to rows `first` ... of matrices [64, kDim] that lie one after the
// other. Those from `valid` on, and columns from dim on, become zeros. By all threads.
template <int kDim, int kCount>
FW_DEVICE void copy_rows(const TokenArg& from, int head, int row, int valid, int dim, uint32_t to, int first) {
  constexpr unsigned kPackets = kDim / 8, kRows = kWorkers / kPackets;  // that are copied at a time
  static_assert(kCount % kRows == 0);
  const char* const base = static_cast<const char*>(from.data) + head * from.stride_h * 2;
  const auto thread = static_cast<unsigned>(opaque(static_cast<int>(thread_index())));  // not kept for the next block
  const unsigned packet = thread % kPackets, own = thread / kPackets;
  const int own_valid = static_cast<int>(packet * 8) < dim ? valid - static_cast<int>(own) : 0;
  const char* source = base + ((row + static_cast<int64_t>(own)) * from.stride_t + packet * 8) * 2;
  FW_UNROLL
  for (unsigned r = 0; r < kCount; r += kRows) {
    const bool there = static_cast<int>(r) < own_valid;
    const unsigned at = static_cast<unsigned>(first) + own + r;
    cp_async_16(to + at / 64 * kHalfBytes<kDim> + atom_offset(static_cast<int>(at % 64), static_cast<int>(packet)),
                there ? source : base, there);
    source += from.stride_t * (2 * kRows);
  }
}

// Left operand of a warp: 16 rows, from `row` on, of a matrix [64, 16 kSteps]. In registers, or read by each product.
template <int kSteps>
struct HeldRows {
  uint32_t of[kSteps][4];
  FW_DEVICE HeldRows(uint32_t matrix, int row) {
    FW_UNROLL
    for (int k = 0; k < kSteps; ++k) ldmatrix_x4(of[k], a_fragment(matrix, row, 2 * k));
  }
  FW_DEVICE void get(int k, uint32_t (&a)[4]) const {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = of[k][i];
  }
};
struct SharedRows {
  uint32_t matrix;
  int row;
  FW_DEVICE SharedRows(uint32_t of, int first) : matrix(of), row(first) {}
  FW_DEVICE void get(int k, uint32_t (&a)[4]) const { ldmatrix_x4(a, a_fragment(matrix, row, 2 * k)); }
};

// d [16 rows of the warp, kN] += a b^T over kDim channels: those of a from channel `channel` on, and rows `first` ...
// of b, a matrix [64, kDim].
template <int kDim, int kN, class Rows>
FW_DEVICE void add_transposed(float (&d)[kN / 8][4], const Rows& a, int channel, uint32_t b, int first) {
  FW_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t left[4];
    a.get(channel / 16 + k, left);
    FW_UNROLL
    for (int j = 0; j < kN / 16; ++j) {
      uint32_t right[4];
      ldmatrix_x4(right, b_fragment(b, first + 16 * j, 2 * k));
      mma_bf16(d[2 * j], left, right[0], right[1]);
      mma_bf16(d[2 * j + 1], left, right[2], right[3]);
    }
  }
}

template <int kDim, int kN, class Rows>
FW_DEVICE void multiply_transposed(float (&d)[kN / 8][4], const Rows& a, uint32_t b, int first) {
  FW_UNROLL
  for (int j = 0; j < kN / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
  add_transposed<kDim, kN>(d, a, 0, b, first);
}

// d [16 rows of the warp, kDim] += a [16, kN] times rows `first` ... of b, a matrix [64, kDim].
template <int kDim, int kN>
FW_DEVICE void add_product(float (&d)[kDim / 8][4], const uint32_t (&a)[kN / 16][4], uint32_t b, int first) {
  FW_UNROLL
  for (int k = 0; k < kN / 16; ++k) {
    FW_UNROLL
    for (int j = 0; j < kDim / 16; ++j) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, b_fragment_trans(b, first + 16 * k, 2 * j));
      mma_bf16(d[2 * j], a[k], right[0], right[1]);
      mma_bf16(d[2 * j + 1], a[k], right[2], right[3]);
    }
  }
}

// Accumulators by 8 columns as what they are in all.
template <int kTiles>
FW_DEVICE float (&in_one(float (&d)[kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float(&)[4 * kTiles]>(d);
}

// Those of part `part`.
template <int kColumns, int kTiles>
FW_DEVICE float (&part_of(float (&d)[kTiles][4], int part))[kColumns / 8][4] {
  return reinterpret_cast<float(&)[kColumns / 8][4]>(d[part * (kColumns / 8)]);
}

// The head of this block, of `heads` heads, and its kRows rows: a tile, or part of one that begins at tile.first.
template <int kRows>
struct OwnTile {
  AttentionTile tile;
  int head;
  FW_DEVICE OwnTile(const AttentionArgs& args, int heads) : head(static_cast<int>(block_index_x()) % heads) {
    constexpr int kBlocks = kAttentionRows / kRows;
    const int index = static_cast<int>(block_index_x()) / heads;
    tile = args.tiles[index / kBlocks];
    tile.first += index % kBlocks * kRows;
  }
};
template <int kRows>
Dim3 each_tile(const AttentionArgs& args, int heads) {
  return {static_cast<unsigned>(static_cast<int64_t>(args.tile_count) * (kAttentionRows / kRows) * heads)};
}

// ---- Pairs -------------------------------------------------------------------------------------------------------------------

// Memory through which a lane hands [kN][4] numbers of 4 bytes to the same lane of the pair's other warp.
template <int kN>
inline constexpr int kPairBytes = kN * 32 * 16;
// Named barriers of the pairs: four from this one on.
inline constexpr int kPairBarrier = 5;
FW_DEVICE void pair_sync() { named_barrier_sync(kPairBarrier + warp_in_group(), 64); }
FW_DEVICE void pair_arrive() { named_barrier_arrive(kPairBarrier + warp_in_group(), 64); }

template <class T>
struct alignas(16) Quad {
  T of[4];
};
template <class T, int kN>
FW_DEVICE void give_lanes(char* memory, const T (&x)[kN][4]) {
  FW_UNROLL
  for (int n = 0; n < kN; ++n)
    reinterpret_cast<Quad<T>*>(memory)[n * 32 + static_cast<int>(lane_index())] = {x[n][0], x[n][1], x[n][2], x[n][3]};
}
template <class T, int kN>
FW_DEVICE void take_lanes(const char* memory, T (&x)[kN][4]) {
  FW_UNROLL
  for (int n = 0; n < kN; ++n) {
    const Quad<T> quad = reinterpret_cast<const Quad<T>*>(memory)[n * 32 + static_cast<int>(lane_index())];
    FW_UNROLL
    for (int i = 0; i < 4; ++i) x[n][i] = quad.of[i];
  }
}

}  // namespace fw::cuda
