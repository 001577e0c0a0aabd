// What the three kernels of attention share: which keys a query sees, matrices of a tile in shared memory and their
// products.
//
// A block is three warpgroups. Thread 0 (and warp 1 where said) of the first loads tiles through a ring of stages. The
// other two, "the workers", own 64 rows of the block's tile each and wait for nothing but the ring. Matrices of 64 rows
// are panels of 64 columns (tiles.h); matrices of 128 rows are panels twice as tall.
#pragma once

#include <algorithm>

#include "gpu/launch.h"
#include "gpu/sm80/fragments.cuh"
#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "gpu/tensor_map.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/rotary.cuh"

namespace fw::cuda {

inline constexpr unsigned kAttentionThreads = 384;
inline constexpr int kWorkers = 256;  // threads
inline constexpr int kAttentionBarrierBytes = 256;
// Registers of a thread of the loaders and of the workers. A block is given 168 for each of its threads (64 K registers
// in eights), and who asks for more than the others give back waits for ever.
template <int kLoader, int kWorker>
struct RegisterShares {
  static constexpr int kProducers = kLoader, kEachWorker = kWorker;
  static_assert(128 * kLoader + kWorkers * kWorker <=
                static_cast<int>(kAttentionThreads) * (65536 / static_cast<int>(kAttentionThreads) / 8 * 8));
};
// Named barriers: turns of the two workers, what a worker leaves in shared memory, rows that all workers clear.
inline constexpr int kRotaryBarrier = 1, kLeaveBarrier = 3, kClearBarrier = 5;

template <int kDim>
inline constexpr int kHalfBytes = 64 * kDim * 2;  // a matrix [64, kDim]

// ---- Who sees whom -----------------------------------------------------------------------------------------------------------

// Positions of keys and queries of a tile's sequence.
struct Sight {
  int queries, keys, offset, window;
  FW_DEVICE Sight(const AttentionTile& tile, int window_size)
      : queries(tile.queries), keys(tile.keys), offset(tile.keys - tile.queries), window(window_size) {}
  FW_DEVICE bool sees(int query, int key) const {
    const int last = query + offset;
    return query < queries && key <= last && (window == 0 || key > last - window);
  }
  // All of `count` keys are seen by all of `rows` queries.
  FW_DEVICE bool sees_all(int query, int rows, int key, int count) const {
    return query + rows <= queries && key + count - 1 <= query + offset &&
           (window == 0 || key > query + rows - 1 + offset - window);
  }
  // Keys that any of the queries [query, query + rows) sees: [first_key, end_key).
  FW_DEVICE int first_key(int query) const { return window == 0 ? 0 : max(0, query + offset - window + 1); }
  FW_DEVICE int end_key(int query, int rows) const { return min(keys, query + rows + offset); }
  // Queries that see any of the keys [key, key + rows).
  FW_DEVICE int first_query(int key) const { return max(0, key - offset); }
  FW_DEVICE int end_query(int key, int rows) const {
    return window == 0 ? queries : min(queries, key + rows - 1 + window - offset);
  }
};

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

// Row (of the tile) of accumulators 0, 1 of this lane in worker `worker`; 2, 3 are eight rows further.
FW_DEVICE int worker_row(int worker) { return 64 * worker + 16 * warp_in_group() + static_cast<int>(lane_index()) / 4; }
// Column of accumulator i.
FW_DEVICE int accumulator_column(int i) { return i / 4 * 8 + 2 * (static_cast<int>(lane_index()) % 4) + i % 2; }

// The gradient of what was turned, as accumulators d, becomes that of what it was before. position: of the row of
// accumulators 0, 1.
template <int kDim>
FW_DEVICE void rotate_back(float (&d)[kDim / 2], const RotaryShares& shares, int64_t position) {
  FW_UNROLL
  for (int n = 0; n < kDim / 16; ++n) {
    FW_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint64_t share = shares.of[accumulator_column(4 * n + e)];
      FW_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int i = 4 * n + 2 * h + e;
        const float angle = rotary_angle(share, position + 8 * h);
        rotate_pair(d[i], d[i + kDim / 4], cos_fast(angle), -sin_fast(angle));
      }
    }
  }
}
FW_DEVICE int64_t position_of_first(const AttentionArgs& args, const AttentionTile& tile) {
  return args.positions == nullptr ? 0 : args.positions[tile.sequence];
}

// A worker's result [64, kDim], of which rows below `valid` go to rows row, row + 1, ... of a tensor's head, through
// `half` ([64, kDim], that no product reads any more).
template <int kDim>
FW_DEVICE void leave(const float (&d)[kDim / 2], const TokenArg& to, int head, int row, int valid, int dim, char* half,
                     int barrier) {
  uint32_t a[kDim / 16][4];
  pack_fragments(d, a);
  named_barrier_sync(barrier, 128);  // what was left before has been taken away
  const uint32_t address = shared_address(half);
  FW_UNROLL
  for (int k = 0; k < kDim / 16; ++k) store_state_fragment(address, k, a[k]);
  named_barrier_sync(barrier, 128);
  constexpr int kVec16 = kDim / 8;
  char* const base = static_cast<char*>(to.data) + (static_cast<int64_t>(row) * to.stride_t + head * to.stride_h) * 2;
  const int thread = opaque(static_cast<int>(thread_index())) % 128;  // made here, not kept from a tile to the next
  FW_UNROLL
  for (int i = 0; i < kVec16 / 2; ++i) {
    const int at = i * 128 + thread, r = at / kVec16, piece = at % kVec16;
    const uint4 x =
        *reinterpret_cast<const uint4*>(half + piece / 8 * kSw128Bytes + r * 128 + ((piece % 8) ^ (r & 7)) * 16);
    if (r < valid && piece * 8 < dim)
      *reinterpret_cast<uint4*>(base + (static_cast<int64_t>(r) * to.stride_t + piece * 8) * 2) = x;
  }
}

// ---- Host ------------------------------------------------------------------------------------------------------------------------

// As many blocks as there are pieces and SMs for them.
inline Dim3 attention_grid(const AttentionArgs& args, int heads) {
  return {static_cast<unsigned>(std::min<int64_t>(static_cast<int64_t>(args.tile_count) * heads, args.sm_count)), 1, 1};
}

// Calls f<kDim>() with the columns of a tile for heads of so many channels.
template <class F>
void for_dim(int dim, const F& f) {
  if (dim <= 64) return f.template operator()<64>();
  if (dim <= 128) return f.template operator()<128>();
  f.template operator()<256>();
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
