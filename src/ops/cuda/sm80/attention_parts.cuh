// What the kernels of attention without Hopper's instructions share: rows that come by cp.async and products by
// mma.sync. A block is the eight warps of the workers (ops/cuda/attention_parts.cuh) and has one tile of one head. What
// it walks over comes in blocks of rows into a ring of two stages, the next one while this one is computed.
#pragma once

#include "gpu/sw128_atoms.cuh"
#include "ops/cuda/attention_parts.cuh"

namespace fw::cuda {

// Rows row, row + 1, ... of a tensor's head to rows `first` ... of matrices [64, kDim] that lie one after the other:
// `count` of them, of which those from `valid` on, and columns from dim on, become zeros. By all threads.
template <int kDim>
FW_DEVICE void copy_rows(const TokenArg& from, int head, int row, int valid, int dim, uint32_t to, int first,
                         int count) {
  constexpr int kPackets = kDim / 8;
  const char* const base = static_cast<const char*>(from.data) + head * from.stride_h * 2;
  FW_UNROLL
  for (int begin = 0; begin < count * kPackets; begin += kWorkers) {
    const int i = begin + static_cast<int>(thread_index()), r = i / kPackets, packet = i % kPackets;
    if (i >= count * kPackets) break;
    const bool there = r < valid && packet * 8 < dim;
    const int at = first + r;
    const char* const source = base + (static_cast<int64_t>(row + r) * from.stride_t + packet * 8) * 2;
    cp_async_16(to + static_cast<uint32_t>(at / 64 * kHalfBytes<kDim>) + atom_offset(at % 64, packet),
                there ? source : base, there);
  }
}

// d [16 rows of the warp, kN] = a b^T: rows `row` ... of a and `first` ... of b, matrices [64, kDim].
template <int kDim, int kN>
FW_DEVICE void multiply_transposed(float (&d)[kN / 8][4], uint32_t a, int row, uint32_t b, int first) {
  FW_UNROLL
  for (int j = 0; j < kN / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
  FW_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t left[4];
    ldmatrix_x4(left, a_fragment(a, row, 2 * k));
    FW_UNROLL
    for (int j = 0; j < kN / 16; ++j) {
      uint32_t right[4];
      ldmatrix_x4(right, b_fragment(b, first + 16 * j, 2 * k));
      mma_bf16(d[2 * j], left, right[0], right[1]);
      mma_bf16(d[2 * j + 1], left, right[2], right[3]);
    }
  }
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

// The tile and head of this block, of `heads` heads.
struct OwnTile {
  AttentionTile tile;
  int head;
  FW_DEVICE OwnTile(const AttentionArgs& args, int heads)
      : tile(args.tiles[static_cast<int>(block_index_x()) / heads]), head(static_cast<int>(block_index_x()) % heads) {}
};
inline Dim3 each_tile(const AttentionArgs& args, int heads) {
  return {static_cast<unsigned>(static_cast<int64_t>(args.tile_count) * heads)};
}

// Calls f<kDim>() with the columns of a tile: of heads of up to kSm80MostDim channels.
template <class F>
void for_sm80_dim(int dim, const F& f) {
  dim <= 64 ? f.template operator()<64>() : f.template operator()<128>();
}

}  // namespace fw::cuda
