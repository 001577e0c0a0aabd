// Attention backward, first pass: delta = rowsum(O dO) and dQ = scale dS K with dS = P (dO V^T - delta), P =
// exp2(scale' S - lse). A block, of which there is one an SM, takes tiles of 128 queries of one head, one after the
// other. It walks over blocks of 64 keys, from the last that any of them sees to the first.
//
//   warpgroup 0, thread 0    loads Q and dO of a tile, and K and V of a block of keys into a ring of stages
//   warpgroups 1, 2          workers: rows 64 (w - 1) ... of the tile; delta from O in global memory and dO in shared memory, then
//                            S = Q K^T, dO V^T, dQ += dS K; one worker's exponentials run alongside the other's
//                            products
//   barriers                 rows, ring: full by bytes, empty by all workers
//   shared memory            Q [2][64, D], dO [2][64, D], stages of K [64, D] and V [64, D], delta [128], barriers; dQ leaves through Q
#include "gpu/sm90/ptx.cuh"
#include "ops/cuda/sm90/attention_parts.cuh"

namespace fw::cuda {
namespace {

using Registers = RegisterShares<24, 240>;
constexpr int kKeys = 64;  // of a block

template <int kDim>
struct QueryShape {
  static constexpr int kHalf = kHalfBytes<kDim>, kStages = kDim > 128 ? 1 : 4;
  static constexpr int kQ = 0, kGradient = 2 * kHalf, kRing = 4 * kHalf, kStage = 2 * kHalf,
                       kDelta = kRing + kStages * kStage, kBarriers = kDelta + kAttentionRows * 4,
                       kShared = kBarriers + kAttentionBarrierBytes;
  struct Barriers {
    RingBarriers<1> rows;
    RingBarriers<kStages> stages;
  };
  static_assert(sizeof(Barriers) <= kAttentionBarrierBytes && kShared <= kMaxSharedBytes);
};

struct QueryMaps {
  TensorMap q, k, v, d_o;
};

template <int kDim>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_queries_kernel(const AttentionArgs args, const __grid_constant__ QueryMaps maps,
                             const __grid_constant__ RotaryShares rotations) {
  using Shape = QueryShape<kDim>;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.rows.init(1, kWorkers);
    barriers.stages.init(1, kWorkers);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();

  if (thread_index() < 128) {
    register_count_decrease<Registers::kProducers>();
    if (thread_index() != 0) return;
    Ring<Shape::kStages> ring;
    Ring<1> rows;
    Piece piece;
    FW_NO_UNROLL
    for (int number = 0; find_piece(args, args.heads, number, piece); ++number, rows.next()) {
      const KeyBlocks<kKeys> blocks(args, piece.tile);
      const int kv_head = piece.head / (args.heads / args.kv_heads);
      FW_NO_UNROLL
      for (int j = blocks.last; j >= blocks.first; --j, ring.next()) {
        barriers.stages.wait_empty(ring);
        char* const stage = shared + Shape::kRing + ring.slot * Shape::kStage;
        uint64_t* const full = barriers.stages.full + ring.slot;
        mbarrier_expect(full, Shape::kStage);
        issue_k_half<kDim>(maps.k, kv_head, piece.tile.key + j * kKeys, stage, kSw128Bytes, full);
        issue_k_half<kDim>(maps.v, kv_head, piece.tile.key + j * kKeys, stage + Shape::kHalf, kSw128Bytes, full);
        // after as many blocks as find room: the rows may have to wait
        if (j == max(blocks.first, blocks.last - Shape::kStages + 1)) {
          barriers.rows.wait_empty(rows);
          mbarrier_expect(barriers.rows.full, 4 * Shape::kHalf);
          FW_UNROLL
          for (int half = 0; half < 2; ++half) {
            const int row = piece.tile.query + piece.tile.first + 64 * half;
            issue_k_half<kDim>(maps.q, piece.head, row, shared + Shape::kQ + half * Shape::kHalf, kSw128Bytes,
                               barriers.rows.full);
            issue_k_half<kDim>(maps.d_o, piece.head, row, shared + Shape::kGradient + half * Shape::kHalf, kSw128Bytes,
                               barriers.rows.full);
          }
        }
      }
    }
    return;
  }

  register_count_increase<Registers::kEachWorker>();
  const int worker = static_cast<int>(thread_index()) / 128 - 1;
  const uint32_t base = shuffle(shared_address(shared), 0);
  const uint32_t q = base + Shape::kQ + worker * Shape::kHalf, d_o = base + Shape::kGradient + worker * Shape::kHalf;
  const float scale = args.scale * kLog2E;
  float* const delta_rows = reinterpret_cast<float*>(shared + Shape::kDelta) + 64 * worker;
  Ring<Shape::kStages> ring;
  Ring<1> tile_ring;
  Piece piece;
  FW_NO_UNROLL
  for (int number = 0; find_piece(args, args.heads, number, piece); ++number, tile_ring.next()) {
    const AttentionTile tile = piece.tile;
    const Sight sight(tile, args.window);
    const KeyBlocks<kKeys> blocks(args, tile);
    const int rows = tile.first + 64 * worker;
    barriers.rows.wait_full(tile_ring);
    make_delta<kDim>(args, tile, piece.head, rows, shared + Shape::kGradient + worker * Shape::kHalf, delta_rows);
    named_barrier_sync(kLeaveBarrier + worker, 128);
    const int row = 16 * warp_in_group() + static_cast<int>(lane_index()) / 4, query = rows + row;
    float lse[2], delta[2];
    FW_UNROLL
    for (int h = 0; h < 2; ++h) {
      lse[h] =
          query + 8 * h < tile.queries ? args.lse[piece.head * args.query_rows + tile.query + query + 8 * h] : INFINITY;
      delta[h] = delta_rows[row + 8 * h];
    }

    float dq[kDim / 2];
    FW_UNROLL
    for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.0f;
    FW_NO_UNROLL
    for (int j = blocks.last; j >= blocks.first; --j, ring.next()) {
      const uint32_t stage = base + Shape::kRing + ring.slot * Shape::kStage;
      float s[kKeys / 2], dp[kKeys / 2];
      uint32_t ds[kKeys / 16][4];
      barriers.stages.wait_full(ring);
      if (sight.keys - j * kKeys < kKeys) {  // another sequence's rows: dS is 0 there, K must be numbers
        clear_rows<kDim>(shared + Shape::kRing + ring.slot * Shape::kStage, kSw128Bytes, sight.keys - j * kKeys,
                         static_cast<int>(thread_index()) - 128, kWorkers);
        fence_async_shared();
        named_barrier_sync(kClearBarrier, kWorkers);
      }
      wgmma_fence();
      multiply_transposed<kDim, kKeys>(s, q, stage);
      wgmma_commit();
      multiply_transposed<kDim, kKeys>(dp, d_o, stage + Shape::kHalf);
      wgmma_commit();
      wgmma_wait<1>();
      keep(s);
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) s[i] = exp2_fast(fmaf(s[i], scale, -lse[i % 4 / 2]));
      wgmma_wait<0>();
      keep(dp);
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) s[i] *= dp[i] - delta[i % 4 / 2];
      if (!sight.sees_all(rows, 64, j * kKeys, kKeys)) {
        FW_UNROLL
        for (int i = 0; i < kKeys / 2; ++i) {
          if (!sight.sees(query + i % 4 / 2 * 8, j * kKeys + accumulator_column(i))) s[i] = 0.0f;
        }
      }
      pack_fragments(s, ds);
      wgmma_fence();
      add_product<kDim, kKeys>(dq, ds, stage);
      wgmma_commit();
      wgmma_wait<0>();
      keep(dq);
      keep_fragments(ds);
      barriers.stages.put_empty(ring);
    }
    FW_UNROLL
    for (int i = 0; i < kDim / 2; ++i) dq[i] *= args.scale;
    if constexpr (kDim <= 128) {
      if (args.theta != 0) rotate_back<kDim>(dq, rotations, position_of_first(args, tile) + query);
    }
    leave<kDim>(dq, args.dq, piece.head, tile.query + rows, tile.queries - rows, args.dim,
                shared + Shape::kQ + worker * Shape::kHalf, kLeaveBarrier + worker);
    fence_async_shared();  // the next tile's rows come where these were
    barriers.rows.put_empty(tile_ring);
  }
}

template <int kDim>
void launch_queries(const AttentionArgs& args, void* stream) {
  QueryMaps maps;
  map_or_fail("q", args.q, args.query_rows, args.heads, args.dim, maps.q);
  map_or_fail("k", args.k, args.key_rows, args.kv_heads, args.dim, maps.k);
  map_or_fail("v", args.v, args.key_rows, args.kv_heads, args.dim, maps.v);
  map_or_fail("dO", args.d_o, args.query_rows, args.heads, args.dim, maps.d_o);
  launch_overlapped(attention_queries_kernel<kDim>, attention_grid(args, args.heads), kAttentionThreads,
                    QueryShape<kDim>::kShared, stream, args, maps, RotaryShares(args.theta, args.dim));
}

}  // namespace

void sm90::attention_backward_queries(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_queries<kDim>(args, stream); });
}

}  // namespace fw::cuda
