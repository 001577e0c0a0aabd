// What the kernels of attention share on any GPU: which keys a query sees, softmax, and a tile's rows and results.
// Eight warps in two groups of four, "the workers", own 64 rows of a tile of 128 each, 16 a warp. Matrices of 64 rows
// are panels of 64 columns (gpu/sw128.h). Accumulators are laid out as gpu/sm80/fragments.cuh says.
#pragma once

#include <algorithm>
#include <cmath>

#include "gpu/launch.h"
#include "gpu/sm80/fragments.cuh"
#include "ops/cuda/attention.h"
#include "ops/cuda/rotary.cuh"

namespace fw::cuda {

inline constexpr int kWorkers = 256;  // threads
// Named barriers of what a worker leaves in shared memory: this and the next.
inline constexpr int kLeaveBarrier = 3;

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

// ---- Blocks ------------------------------------------------------------------------------------------------------------------

// The blocks of keys that the first kRows queries of a tile see.
template <int kKeys, int kRows = kAttentionRows>
struct KeyBlocks {
  int first, last;
  FW_DEVICE KeyBlocks(const AttentionArgs& args, const AttentionTile& tile) {
    const Sight sight(tile, args.window);
    first = sight.first_key(tile.first) / kKeys, last = (sight.end_key(tile.first, kRows) - 1) / kKeys;
  }
};

// body(head of q, block of kQueries queries) of the first kRows keys of a tile and a key head: the order in which sums
// are made.
template <int kQueries, int kRows = kAttentionRows, class Body>
FW_DEVICE void for_query_blocks(const AttentionArgs& args, const AttentionTile& tile, int kv_head, const Body& body) {
  const Sight sight(tile, args.window);
  const int first = sight.first_query(tile.first) / kQueries,
            end = (sight.end_query(tile.first, kRows) + kQueries - 1) / kQueries;
  const int group = args.heads / args.kv_heads;
  FW_NO_UNROLL
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    FW_NO_UNROLL
    for (int i = first; i < end; ++i) body(head, i);
  }
}

// ---- Softmax and its gradient ------------------------------------------------------------------------------------------------

// Running maximum (of scores as they are) and sum of exponentials of this lane's two rows; the sum is of its own
// columns until finish().
struct Softmax {
  float top[2], sum[2];
  FW_DEVICE Softmax() : top{-INFINITY, -INFINITY}, sum{0, 0} {}

  // Scores become exp2(scale (s - top)); factor: what everything before must be multiplied with.
  template <int kN>
  FW_DEVICE void step(float (&s)[kN], float scale, float (&factor)[2]) {
    FW_UNROLL
    for (int h = 0; h < 2; ++h) {
      float most = top[h];
      FW_UNROLL
      for (int i = 0; i < kN / 4; ++i) most = max(most, max(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
      most = max(most, shuffle_xor(most, 1));
      most = max(most, shuffle_xor(most, 2));
      const float base = most == -INFINITY ? 0.0f : most * scale;  // nothing seen yet
      factor[h] = exp2_fast(fmaf(top[h], scale, -base));
      top[h] = most;
      float total = 0;
      FW_UNROLL
      for (int i = 0; i < kN / 4; ++i) {
        FW_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * i + 2 * h + e];
          x = exp2_fast(fmaf(x, scale, -base));
          total += x;
        }
      }
      sum[h] = fmaf(sum[h], factor[h], total);
    }
  }
  FW_DEVICE void finish() {
    FW_UNROLL
    for (int h = 0; h < 2; ++h) {
      sum[h] += shuffle_xor(sum[h], 1);
      sum[h] += shuffle_xor(sum[h], 2);
    }
  }
};

FW_DEVICE float dot8(const uint4& x, const uint4& y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
  FW_UNROLL
  for (int i = 0; i < 4; ++i) sum = fmaf(bf16_high(a[i]), bf16_high(b[i]), fmaf(bf16_low(a[i]), bf16_low(b[i]), sum));
  return sum;
}

// delta of the worker's 64 rows into delta[64] and global memory; eight lanes a row.
template <int kDim>
FW_DEVICE void make_delta(const AttentionArgs& args, const AttentionTile& tile, int head, int rows, const char* d_o,
                          float* delta) {
  const int lane = static_cast<int>(lane_index()), piece = lane % 8;
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int r = 16 * warp_in_group() + 4 * i + lane / 8, query = rows + r;
    float sum = 0;
    if (query < tile.queries) {
      const char* const o = static_cast<const char*>(args.o.data) +
                            (static_cast<int64_t>(tile.query + query) * args.o.stride_t + head * args.o.stride_h) * 2;
      FW_UNROLL
      for (int panel = 0; panel < kDim / 64; ++panel) {
        const int column = 64 * panel + 8 * piece;
        if (column < args.dim) {
          sum += dot8(*reinterpret_cast<const uint4*>(o + column * 2),
                      *reinterpret_cast<const uint4*>(d_o + panel * kSw128Bytes + r * 128 + ((piece ^ (r & 7)) * 16)));
        }
      }
    }
    FW_UNROLL
    for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
    if (piece == 0) {
      delta[r] = sum;
      if (query < tile.queries) args.delta[head * args.query_rows + tile.query + query] = sum;
    }
  }
}

// ---- Rows and results -----------------------------------------------------------------------------------------------------

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

// Calls f<kDim>() with the columns of a tile for heads of so many channels.
template <class F>
void for_dim(int dim, const F& f) {
  if (dim <= 64) return f.template operator()<64>();
  if (dim <= 128) return f.template operator()<128>();
  f.template operator()<256>();
}

}  // namespace fw::cuda
