// Attention backward, second pass: dV = P^T dO and dK = scale dS^T Q with dS = P (dO V^T - delta), P = exp2(scale' S -
// lse), of what the first pass made. A block, of which there is one an SM, takes tiles of 128 keys of one key head, one
// after the other. For each head of its group it walks over blocks of 64 queries, from the first that sees any of the
// keys.
//
//   warpgroup 0, thread 0    loads K and V of a tile, then Q and dO of a block of queries into a ring of stages
//   warpgroup 0, warp 1      loads lse and delta of those queries
//   warpgroups 1, 2          workers: rows 64 (w - 1) ... of the tile: S^T = K Q^T, (dO V^T)^T = V dO^T, dV += P^T dO, dK += dS^T Q, all sums in registers.
//                            Of 256 channels a thread has registers for one sum: a kernel makes dV, another dK
//   barriers                 rows: full by bytes; ring: full by bytes and warp 1; both empty by all workers
//   shared memory            K [2][64, D], V [2][64, D], stages of Q [64, D], dO [64, D], lse [64], delta [64], barriers; dK, dV leave through K, V
#include "gpu/sm90/ptx.cuh"
#include "ops/cuda/sm90/attention_parts.cuh"

namespace fw::cuda {
namespace {

using Registers = RegisterShares<40, 232>;
constexpr int kQueries = 64;  // of a block

// What a kernel makes.
enum class Sums { kBoth, kValues, kKeys };

template <int kDim>
struct KeyShape {
  static constexpr int kHalf = kHalfBytes<kDim>, kStages = kDim > 128 ? 1 : kDim == 128 ? 3 : 4;
  static constexpr int kK = 0, kV = 2 * kHalf, kRing = 4 * kHalf, kNumbers = 2 * kHalf, kStage = kNumbers + 1024,
                       kBarriers = kRing + kStages * kStage, kShared = kBarriers + kAttentionBarrierBytes;
  struct Barriers {
    RingBarriers<1> rows;
    RingBarriers<kStages> stages;
  };
  static_assert(sizeof(Barriers) <= kAttentionBarrierBytes && kShared <= kMaxSharedBytes);
};

struct KeyMaps {
  TensorMap q, k, v, d_o;
};

// for_query_blocks() of a piece, a stage of the ring each.
template <int kStages, class Body>
FW_DEVICE void for_each_block(const AttentionArgs& args, const Piece& piece, Ring<kStages>& ring, const Body& body) {
  for_query_blocks<kQueries>(args, piece.tile, piece.head, [&](int head, int i) {
    body(head, i);
    ring.next();
  });
}

template <int kDim, Sums kSums>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_keys_kernel(const AttentionArgs args, const __grid_constant__ KeyMaps maps,
                          const __grid_constant__ RotaryShares rotations) {
  using Shape = KeyShape<kDim>;
  constexpr bool kMakesK = kSums != Sums::kValues, kMakesV = kSums != Sums::kKeys;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.rows.init(1, kWorkers);
    barriers.stages.init(1 + 32, kWorkers);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();

  if (thread_index() < 128) {
    register_count_decrease<Registers::kProducers>();
    Ring<Shape::kStages> ring;
    Piece piece;
    if (thread_index() == 0) {
      Ring<1> rows;
      FW_NO_UNROLL
      for (int number = 0; find_piece(args, args.kv_heads, number, piece); ++number, rows.next()) {
        barriers.rows.wait_empty(rows);
        mbarrier_expect(barriers.rows.full, (kMakesK ? 4 : 2) * Shape::kHalf);
        FW_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int row = piece.tile.key + piece.tile.first + 64 * half;
          issue_k_half<kDim>(maps.k, piece.head, row, shared + Shape::kK + half * Shape::kHalf, kSw128Bytes,
                             barriers.rows.full);
          if constexpr (kMakesK) {
            issue_k_half<kDim>(maps.v, piece.head, row, shared + Shape::kV + half * Shape::kHalf, kSw128Bytes,
                               barriers.rows.full);
          }
        }
        for_each_block(args, piece, ring, [&](int head, int i) {
          barriers.stages.wait_empty(ring);
          char* const stage = shared + Shape::kRing + ring.slot * Shape::kStage;
          uint64_t* const full = barriers.stages.full + ring.slot;
          mbarrier_expect(full, 2 * Shape::kHalf);
          issue_k_half<kDim>(maps.q, head, piece.tile.query + i * kQueries, stage, kSw128Bytes, full);
          issue_k_half<kDim>(maps.d_o, head, piece.tile.query + i * kQueries, stage + Shape::kHalf, kSw128Bytes, full);
        });
      }
    } else if (warp_index() == 1) {
      FW_NO_UNROLL
      for (int number = 0; find_piece(args, args.kv_heads, number, piece); ++number) {
        for_each_block(args, piece, ring, [&](int head, int i) {
          barriers.stages.wait_empty(ring);
          float* const numbers =
              reinterpret_cast<float*>(shared + Shape::kRing + ring.slot * Shape::kStage + Shape::kNumbers);
          FW_UNROLL
          for (int half = 0; half < 2; ++half) {
            const int at = 32 * half + static_cast<int>(lane_index()), query = i * kQueries + at;
            const int64_t from = head * args.query_rows + piece.tile.query + query;
            numbers[at] = query < piece.tile.queries ? args.lse[from] : INFINITY;
            numbers[kQueries + at] = query < piece.tile.queries ? args.delta[from] : 0.0f;
          }
          barriers.stages.put_full(ring);
        });
      }
    }
    return;
  }

  register_count_increase<Registers::kEachWorker>();
  const int worker = static_cast<int>(thread_index()) / 128 - 1;
  const uint32_t base = shuffle(shared_address(shared), 0);
  const uint32_t k = base + Shape::kK + worker * Shape::kHalf, v = base + Shape::kV + worker * Shape::kHalf;
  const float scale = args.scale * kLog2E;
  Ring<Shape::kStages> ring;
  Ring<1> tile_ring;
  Piece piece;
  FW_NO_UNROLL
  for (int number = 0; find_piece(args, args.kv_heads, number, piece); ++number, tile_ring.next()) {
    const AttentionTile tile = piece.tile;
    const Sight sight(tile, args.window);
    const int rows = tile.first + 64 * worker, key = tile.first + worker_row(worker);
    float dk[kMakesK ? kDim / 2 : 1], dv[kMakesV ? kDim / 2 : 1];
    FW_UNROLL
    for (float& x : dk) x = 0.0f;
    FW_UNROLL
    for (float& x : dv) x = 0.0f;
    barriers.rows.wait_full(tile_ring);
    for_each_block(args, piece, ring, [&](int, int i) {
      const uint32_t stage = base + Shape::kRing + ring.slot * Shape::kStage;
      const float* const numbers =
          reinterpret_cast<const float*>(shared + Shape::kRing + ring.slot * Shape::kStage + Shape::kNumbers);
      float s[kQueries / 2], dp[kQueries / 2];  // of keys (rows) and queries (columns)
      uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
      barriers.stages.wait_full(ring);
      const int valid = tile.queries - i * kQueries;
      if (valid < kQueries) {  // another sequence's rows: P and dS are 0 there, Q and dO must be numbers
        char* const to = shared + Shape::kRing + ring.slot * Shape::kStage;
        clear_rows<kDim>(to, kSw128Bytes, valid, static_cast<int>(thread_index()) - 128, kWorkers);
        clear_rows<kDim>(to + Shape::kHalf, kSw128Bytes, valid, static_cast<int>(thread_index()) - 128, kWorkers);
        fence_async_shared();
        named_barrier_sync(kClearBarrier, kWorkers);
      }
      wgmma_fence();
      multiply_transposed<kDim, kQueries>(s, k, stage);
      wgmma_commit();
      if constexpr (kMakesK) {
        multiply_transposed<kDim, kQueries>(dp, v, stage + Shape::kHalf);
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      keep(s);
      const float* const lse = numbers + 2 * (lane_index() % 4);
      FW_UNROLL
      for (int n = 0; n < kQueries / 8; ++n) {
        const float2 of = *reinterpret_cast<const float2*>(lse + 8 * n);
        FW_UNROLL
        for (int m = 0; m < 4; ++m) s[4 * n + m] = exp2_fast(fmaf(s[4 * n + m], scale, m % 2 == 0 ? -of.x : -of.y));
      }
      if (!sight.sees_all(i * kQueries, kQueries, rows, 64)) {
        FW_UNROLL
        for (int n = 0; n < kQueries / 2; ++n) {
          if (!sight.sees(i * kQueries + accumulator_column(n), key + n % 4 / 2 * 8)) s[n] = 0.0f;
        }
      }
      if constexpr (kMakesV) {
        pack_fragments(s, p);
        wgmma_fence();
        add_product<kDim, kQueries>(dv, p, stage + Shape::kHalf);
        wgmma_commit();
      }
      if constexpr (kMakesK) {
        wgmma_wait<kMakesV ? 1 : 0>();
        keep(dp);
        FW_UNROLL
        for (int n = 0; n < kQueries / 8; ++n) {
          const float2 of = *reinterpret_cast<const float2*>(lse + kQueries + 8 * n);
          FW_UNROLL
          for (int m = 0; m < 4; ++m) s[4 * n + m] *= dp[4 * n + m] - (m % 2 == 0 ? of.x : of.y);
        }
        pack_fragments(s, ds);
        wgmma_fence();
        add_product<kDim, kQueries>(dk, ds, stage);
        wgmma_commit();
      }
      wgmma_wait<0>();
      if constexpr (kMakesK) {
        keep(dk);
        keep_fragments(ds);
      }
      if constexpr (kMakesV) {
        keep(dv);
        keep_fragments(p);
      }
      barriers.stages.put_empty(ring);
    });
    const int row = tile.key + rows, valid = tile.keys - rows;
    if constexpr (kMakesK) {
      FW_UNROLL
      for (float& x : dk) x *= args.scale;
      if constexpr (kDim <= 128) {
        if (args.theta != 0) rotate_back<kDim>(dk, rotations, position_of_first(args, tile) + key - sight.offset);
      }
      leave<kDim>(dk, args.dk, piece.head, row, valid, args.dim, shared + Shape::kK + worker * Shape::kHalf,
                  kLeaveBarrier + worker);
    }
    if constexpr (kMakesV) {
      leave<kDim>(dv, args.dv, piece.head, row, valid, args.dim, shared + Shape::kV + worker * Shape::kHalf,
                  kLeaveBarrier + worker);
    }
    fence_async_shared();  // the next tile's rows come where these were
    barriers.rows.put_empty(tile_ring);
  }
}

template <int kDim>
void launch_keys(const AttentionArgs& args, void* stream) {
  KeyMaps maps;
  map_or_fail("q", args.q, args.query_rows, args.heads, args.dim, maps.q);
  map_or_fail("k", args.k, args.key_rows, args.kv_heads, args.dim, maps.k);
  map_or_fail("v", args.v, args.key_rows, args.kv_heads, args.dim, maps.v);
  map_or_fail("dO", args.d_o, args.query_rows, args.heads, args.dim, maps.d_o);
  const auto launch = [&](auto kernel) {
    launch_overlapped(kernel, attention_grid(args, args.kv_heads), kAttentionThreads, KeyShape<kDim>::kShared, stream,
                      args, maps, RotaryShares(args.theta, args.dim));
  };
  if constexpr (kDim > 128) {
    launch(attention_keys_kernel<kDim, Sums::kValues>);
    launch(attention_keys_kernel<kDim, Sums::kKeys>);
  } else {
    launch(attention_keys_kernel<kDim, Sums::kBoth>);
  }
}

}  // namespace

void sm90::attention_backward_keys(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_keys<kDim>(args, stream); });
}

}  // namespace fw::cuda
