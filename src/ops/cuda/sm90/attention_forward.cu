// Attention forward. A block, of which there is one an SM, takes tiles of 128 queries of one head, one after the other.
// It walks over blocks of 128 keys (64 where heads have 256 channels), from the last that any of them sees to the
// first.
//
//   warpgroup 0, thread 0    loads Q of a tile, and K and V of a block of keys into rings of two stages; it is ahead of the workers by a tile's end
//   warpgroups 1, 2          workers: rows 64 (w - 1) ... of the tile: S = Q K^T, softmax, O += P V. The products of a block's scores run while
//                            the block before it is multiplied with its values, and while the other worker does its
//                            exponentials: they take turns at issuing products
//   barriers                 q, k and v rings: full by bytes, empty by all workers
//   shared memory            Q [2][64, D], O [2][64, D] on its way out, K [2][128, D], V [2][128, D], barriers; of 256 channels O leaves through Q
#include "gpu/sm90/ptx.cuh"
#include "ops/cuda/sm90/attention_parts.cuh"

namespace fw::cuda {
namespace {

using Registers = RegisterShares<24, 240>;
constexpr int kStages = 2;

template <int kDim>
struct ForwardShape {
  static constexpr bool kLeavesThroughQ = kDim > 128;
  static constexpr int kKeys = kDim > 128 ? 64 : 128;  // of a block
  static constexpr int kTile = 2 * kHalfBytes<kDim>, kBlock = kKeys * kDim * 2;
  static constexpr int kQ = 0, kO = kLeavesThroughQ ? kQ : kTile, kK = kO + kTile, kV = kK + kStages * kBlock,
                       kBarriers = kV + kStages * kBlock, kShared = kBarriers + kAttentionBarrierBytes;
  struct Barriers {
    RingBarriers<1> q;
    RingBarriers<kStages> k, v;
  };
  static_assert(sizeof(Barriers) <= kAttentionBarrierBytes && kShared <= kMaxSharedBytes);
};

struct ForwardMaps {
  TensorMap q, k, v;
};

// [kKeys, kDim] as panels of kKeys rows.
template <int kDim>
FW_DEVICE void issue_block(const TensorMap& map, int head, int row, char* to, uint64_t* full) {
  constexpr int kPanels = ForwardShape<kDim>::kKeys / 64;
  mbarrier_expect(full, ForwardShape<kDim>::kBlock);
  FW_UNROLL
  for (int half = 0; half < kPanels; ++half)
    issue_k_half<kDim>(map, head, row + 64 * half, to + half * kSw128Bytes, kPanels * kSw128Bytes, full);
}

template <int kDim>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_forward_kernel(const AttentionArgs args, const __grid_constant__ ForwardMaps maps) {
  using Shape = ForwardShape<kDim>;
  constexpr int kKeys = Shape::kKeys;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.q.init(1, kWorkers);
    barriers.k.init(1, kWorkers);
    barriers.v.init(1, kWorkers);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();

  if (thread_index() < 128) {
    register_count_decrease<Registers::kProducers>();
    if (thread_index() != 0) return;
    Ring<kStages> ring;
    Ring<1> q;
    Piece piece;
    FW_NO_UNROLL
    for (int number = 0; find_piece(args, args.heads, number, piece); ++number, q.next()) {
      const KeyBlocks<kKeys> blocks(args, piece.tile);
      const int kv_head = piece.head / (args.heads / args.kv_heads), query = piece.tile.query + piece.tile.first;
      FW_NO_UNROLL
      for (int j = blocks.last; j >= blocks.first; --j, ring.next()) {
        barriers.k.wait_empty(ring);
        issue_block<kDim>(maps.k, kv_head, piece.tile.key + j * kKeys, shared + Shape::kK + ring.slot * Shape::kBlock,
                          barriers.k.full + ring.slot);
        if (j == blocks.last) {
          barriers.q.wait_empty(q);
          mbarrier_expect(barriers.q.full, Shape::kTile);
          issue_k_half<kDim>(maps.q, piece.head, query, shared + Shape::kQ, kSw128Bytes, barriers.q.full);
          issue_k_half<kDim>(maps.q, piece.head, query + 64, shared + Shape::kQ + kHalfBytes<kDim>, kSw128Bytes,
                             barriers.q.full);
        }
        barriers.v.wait_empty(ring);
        issue_block<kDim>(maps.v, kv_head, piece.tile.key + j * kKeys, shared + Shape::kV + ring.slot * Shape::kBlock,
                          barriers.v.full + ring.slot);
      }
    }
    return;
  }

  register_count_increase<Registers::kEachWorker>();
  const int worker = static_cast<int>(thread_index()) / 128 - 1;
  const uint32_t base = shuffle(shared_address(shared), 0);
  const uint32_t q = base + Shape::kQ + worker * kHalfBytes<kDim>;
  const auto stage = [&](int matrices, const Ring<kStages>& ring) {
    return base + matrices + ring.slot * Shape::kBlock;
  };
  Ring<kStages> k_ring, v_ring;
  Ring<1> q_ring;
  Piece piece;
  FW_NO_UNROLL
  for (int number = 0; find_piece(args, args.heads, number, piece); ++number, q_ring.next()) {
    const AttentionTile tile = piece.tile;
    const float scale = args.scale * kLog2E;
    const Sight sight(tile, args.window);
    const KeyBlocks<kKeys> blocks(args, tile);
    const int rows = tile.first + 64 * worker;  // the worker's first query
    const auto hide = [&](float(&s)[kKeys / 2], int j) {
      if (sight.sees_all(rows, 64, j * kKeys, kKeys)) return;
      const int query = tile.first + worker_row(worker);
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) {
        if (!sight.sees(query + i % 4 / 2 * 8, j * kKeys + accumulator_column(i))) s[i] = -INFINITY;
      }
    };

    float s[kKeys / 2], o[kDim / 2], factor[2];
    uint32_t p[kKeys / 16][4];
    FW_UNROLL
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
    Softmax softmax;
    barriers.q.wait_full(q_ring);
    barriers.k.wait_full(k_ring);
    wgmma_fence();
    multiply_transposed<kDim, kKeys>(s, q, stage(Shape::kK, k_ring));
    wgmma_commit();
    wgmma_wait<0>();
    keep(s);
    barriers.k.put_empty(k_ring);
    k_ring.next();
    if (!Shape::kLeavesThroughQ && blocks.last == blocks.first) barriers.q.put_empty(q_ring);
    hide(s, blocks.last);
    softmax.step(s, scale, factor);
    pack_fragments(s, p);
    // The last block of keys may end with rows of another sequence: their P is 0, their values must be numbers.
    const int valid = sight.keys - blocks.last * kKeys;
    if (valid < kKeys) {
      barriers.v.wait_full(v_ring);
      char* const v = shared + Shape::kV + v_ring.slot * Shape::kBlock;
      const int thread = static_cast<int>(thread_index()) - 128;
      FW_UNROLL
      for (int half = 0; half < kKeys / 64; ++half) {
        clear_rows<kDim>(v + half * kSw128Bytes, kKeys / 64 * kSw128Bytes, min(valid - 64 * half, 64), thread,
                         kWorkers);
      }
      fence_async_shared();
      named_barrier_sync(kClearBarrier, kWorkers);
    }

    // the first turn is worker 0's
    if (worker == 1 && blocks.last > blocks.first) named_barrier_arrive(kRotaryBarrier, kWorkers);
    FW_NO_UNROLL
    for (int j = blocks.last - 1; j >= blocks.first; --j) {
      barriers.k.wait_full(k_ring);
      named_barrier_sync(kRotaryBarrier + worker, kWorkers);
      wgmma_fence();
      multiply_transposed<kDim, kKeys>(s, q, stage(Shape::kK, k_ring));
      wgmma_commit();
      barriers.v.wait_full(v_ring);
      wgmma_fence();
      add_product<kDim, kKeys>(o, p, stage(Shape::kV, v_ring));
      wgmma_commit();
      if (worker == 0 || j > blocks.first) named_barrier_arrive(kRotaryBarrier + (worker ^ 1), kWorkers);
      wgmma_wait<1>();
      keep(s);
      barriers.k.put_empty(k_ring);
      k_ring.next();
      if (!Shape::kLeavesThroughQ && j == blocks.first) barriers.q.put_empty(q_ring);
      hide(s, j);
      softmax.step(s, scale, factor);
      wgmma_wait<0>();
      keep(o);
      keep_fragments(p);
      barriers.v.put_empty(v_ring);
      v_ring.next();
      FW_UNROLL
      for (int i = 0; i < kDim / 2; ++i) o[i] *= factor[i % 4 / 2];
      pack_fragments(s, p);
    }
    barriers.v.wait_full(v_ring);
    wgmma_fence();
    add_product<kDim, kKeys>(o, p, stage(Shape::kV, v_ring));
    wgmma_commit();
    softmax.finish();
    wgmma_wait<0>();
    keep(o);
    keep_fragments(p);
    barriers.v.put_empty(v_ring);
    v_ring.next();

    const float inverse[2] = {1.0f / softmax.sum[0], 1.0f / softmax.sum[1]};
    FW_UNROLL
    for (int i = 0; i < kDim / 2; ++i) o[i] *= inverse[i % 4 / 2];
    if (args.lse != nullptr && lane_index() % 4 == 0) {
      FW_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int query = tile.first + worker_row(worker) + 8 * h;
        if (query < tile.queries)
          args.lse[piece.head * args.query_rows + tile.query + query] =
              fmaf(softmax.top[h], scale, log2f(softmax.sum[h]));
      }
    }
    leave<kDim>(o, args.o, piece.head, tile.query + rows, tile.queries - rows, args.dim,
                shared + Shape::kO + worker * kHalfBytes<kDim>, kLeaveBarrier + worker);
    if constexpr (Shape::kLeavesThroughQ) {
      fence_async_shared();  // the next tile's queries come where O was
      barriers.q.put_empty(q_ring);
    }
  }
}

template <int kDim>
void launch_forward(const AttentionArgs& args, void* stream) {
  ForwardMaps maps;
  map_or_fail("q", args.q, args.query_rows, args.heads, args.dim, maps.q);
  map_or_fail("k", args.k, args.key_rows, args.kv_heads, args.dim, maps.k);
  map_or_fail("v", args.v, args.key_rows, args.kv_heads, args.dim, maps.v);
  launch_overlapped(attention_forward_kernel<kDim>, attention_grid(args, args.heads), kAttentionThreads,
                    ForwardShape<kDim>::kShared, stream, args, maps);
}

}  // namespace

void sm90::attention_forward(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_forward<kDim>(args, stream); });
}

}  // namespace fw::cuda
