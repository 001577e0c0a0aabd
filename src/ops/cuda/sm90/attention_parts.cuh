// What the three kernels of attention on Hopper share: matrices of a tile in shared memory and their products.
//
// A block is three warpgroups. Thread 0 (and warp 1 where said) of the first loads tiles through a ring of stages. The
// other two are the workers (ops/cuda/attention_parts.cuh) and wait for nothing but the ring. Matrices of 128 rows are
// panels twice as tall.
#pragma once

#include <algorithm>

#include "gpu/launch.h"
#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "gpu/tensor_map.h"
#include "ops/cuda/attention_parts.cuh"

namespace fw::cuda {

inline constexpr unsigned kAttentionThreads = 384;
inline constexpr int kAttentionBarrierBytes = 256;
// Registers of a thread of the loaders and of the workers. A block is given 168 for each of its threads (64 K registers
// in eights), and who asks for more than the others give back waits for ever.
template <int kLoader, int kWorker>
struct RegisterShares {
  static constexpr int kProducers = kLoader, kEachWorker = kWorker;
  static_assert(128 * kLoader + kWorkers * kWorker <=
                static_cast<int>(kAttentionThreads) * (65536 / static_cast<int>(kAttentionThreads) / 8 * 8));
};
// Named barriers besides kLeaveBarrier: turns of the two workers, rows that all workers clear.
inline constexpr int kRotaryBarrier = 1, kClearBarrier = 5;

// ---- Work ------------------------------------------------------------------------------------------------------------------------

// A tile and a head (of q, or of k where a block owns keys), and whether there is a piece with this number for this
// block. Blocks take pieces in turn, there and back, so that those that begin with long ones end with short ones.
struct Piece {
  int head = 0;
  AttentionTile tile{};
};
FW_DEVICE bool find_piece(const AttentionArgs& args, int heads, int number, Piece& piece) {
  const int blocks = static_cast<int>(grid_size_x()), block = static_cast<int>(block_index_x());
  const int index = number * blocks + (number % 2 == 0 ? block : blocks - 1 - block);
  if (index >= args.tile_count * heads) return false;
  piece = {index % heads, args.tiles[index / heads]};
  return true;
}

// ---- Tiles ---------------------------------------------------------------------------------------------------------------------

// [64 rows, kDim] from row `row` on: kDim / 64 boxes, `pitch` bytes from one to the next.
template <int kDim>
FW_DEVICE void issue_k_half(const TensorMap& map, int head, int row, char* to, int pitch, uint64_t* full) {
  FW_UNROLL
  for (int panel = 0; panel < kDim / 64; ++panel) tensor_load(to + panel * pitch, map, 64 * panel, head, row, 0, full);
}

// Rows [from, 64) of a matrix [64, kDim] become zeros: they are another sequence's, and 0 times what is there may be no
// number. By `threads` threads, of which this is `thread`; a fence and a barrier must follow.
template <int kDim>
FW_DEVICE void clear_rows(char* half, int pitch, int from, int thread, int threads) {
  constexpr int kVec16 = kDim / 8;
  for (int i = max(from, 0) * kVec16 + thread; i < 64 * kVec16; i += threads) {
    const int row = i / kVec16, piece = i % kVec16;
    *reinterpret_cast<uint4*>(half + piece / 8 * pitch + row * 128 + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
}

// ---- Products: by a worker -------------------------------------------------------------------------------------------------------

// d [64, kN] = a b^T: a [64, kDim] in panels of 64 rows, b [kN, kDim] in panels of kN rows.
template <int kDim, int kN>
FW_DEVICE void multiply_transposed(float (&d)[kN / 2], uint32_t a, uint32_t b) {
  const uint64_t first_a = wgmma_descriptor(a, 16, 1024), first_b = wgmma_descriptor(b, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    wgmma_ss<kN, false, false>(d, descriptor_after(first_a, k / 4 * kSw128Bytes + k % 4 * 32),
                               descriptor_after(first_b, k / 4 * (kN * 128) + k % 4 * 32), k > 0);
  }
}

// d [64, kDim] += a [64, kN] times b [kN, kDim] in panels of kN rows.
template <int kDim, int kN>
FW_DEVICE void add_product(float (&d)[kDim / 2], const uint32_t (&a)[kN / 16][4], uint32_t b) {
  const uint64_t first = wgmma_descriptor(b, kN * 128, 1024);
  FW_UNROLL
  for (int k = 0; k < kN / 16; ++k) wgmma_rs<kDim, true>(d, a[k], descriptor_after(first, k * 2048), true);
}

template <int kN>
FW_DEVICE void keep_fragments(uint32_t (&a)[kN][4]) {
  FW_UNROLL
  for (int k = 0; k < kN; ++k) keep(a[k]);
}

// ---- Host ------------------------------------------------------------------------------------------------------------------------

// As many blocks as there are pieces and SMs for them.
inline Dim3 attention_grid(const AttentionArgs& args, int heads) {
  return {static_cast<unsigned>(std::min<int64_t>(static_cast<int64_t>(args.tile_count) * heads, args.sm_count)), 1, 1};
}

// What a kernel's tiles come through.
inline void map_or_fail(const char* what, const TokenArg& a, int64_t rows, int64_t heads, int64_t dim, TensorMap& map) {
  if (!make_tensor_map(a, 1, rows, heads, dim, map)) {
    fail_internal(
        "attention: {}: expected bf16 rows and heads at multiples of 16 bytes, got strides {} and {} with dim {}", what,
        a.stride_t, a.stride_h, dim);
  }
}
}  // namespace fw::cuda
