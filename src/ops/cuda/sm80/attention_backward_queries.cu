// Attention backward without Hopper's instructions, first pass: delta = rowsum(O dO) and dQ = scale dS K with dS = P
// (dO V^T - delta), P = exp2(scale' S - lse). A block has a tile of 128 queries of one head, 16 a warp, and walks over
// blocks of 32 keys, from the last that any of them sees to the first.
//
//   shared memory   Q [2][64, D], where dQ leaves through; dO [2][64, D]; K [64, D] and V [64, D], each two stages of 32 rows; delta [128]
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kKeys = 32;  // of a block

template <int kDim>
struct QueryShape {
  static constexpr int kHalf = kHalfBytes<kDim>;
  static constexpr int kQ = 0, kGradient = 2 * kHalf, kK = 4 * kHalf, kV = kK + kHalf, kDelta = kV + kHalf,
                       kShared = kDelta + kAttentionRows * 4;
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1)
    sm80_attention_queries_kernel(const AttentionArgs args, const __grid_constant__ RotaryShares rotations) {
  using Shape = QueryShape<kDim>;
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  grid_dependency_wait();
  const OwnTile own(args, args.heads);
  const AttentionTile& tile = own.tile;
  const int worker = static_cast<int>(warp_index()) / 4, kv_head = own.head / (args.heads / args.kv_heads);
  const float scale = args.scale * kLog2E;
  const Sight sight(tile, args.window);
  const KeyBlocks<kKeys> blocks(args, tile);
  const int rows = tile.first + 64 * worker, query = tile.first + worker_row(worker);
  const auto issue = [&](int j, int stage) {
    const auto bring = [&](const TokenArg& from, int to) {
      copy_rows<kDim>(from, kv_head, tile.key + j * kKeys, sight.keys - j * kKeys, args.dim,
                      base + static_cast<uint32_t>(to), stage * kKeys, kKeys);
    };
    bring(args.k, Shape::kK), bring(args.v, Shape::kV);
    cp_async_commit();
  };
  const auto bring_rows = [&](const TokenArg& from, int to) {
    copy_rows<kDim>(from, own.head, tile.query + tile.first, tile.queries - tile.first, args.dim,
                    base + static_cast<uint32_t>(to), 0, kAttentionRows);
  };
  bring_rows(args.q, Shape::kQ), bring_rows(args.d_o, Shape::kGradient);
  cp_async_commit();
  issue(blocks.last, 0);

  cp_async_wait<1>();
  sync_threads();
  const uint32_t q = base + static_cast<uint32_t>(Shape::kQ + worker * Shape::kHalf),
                 d_o = base + static_cast<uint32_t>(Shape::kGradient + worker * Shape::kHalf);
  float* const delta_rows = reinterpret_cast<float*>(shared + Shape::kDelta) + 64 * worker;
  make_delta<kDim>(args, tile, own.head, rows, shared + Shape::kGradient + worker * Shape::kHalf, delta_rows);
  sync_warp();  // a warp's own rows
  const int row = 16 * warp_in_group() + static_cast<int>(lane_index()) / 4;
  float lse[2], delta[2];
  FW_UNROLL
  for (int h = 0; h < 2; ++h) {
    lse[h] =
        query + 8 * h < tile.queries ? args.lse[own.head * args.query_rows + tile.query + query + 8 * h] : INFINITY;
    delta[h] = delta_rows[row + 8 * h];
  }

  float dq[kDim / 8][4] = {};
  int stage = 0;
  FW_NO_UNROLL
  for (int j = blocks.last; j >= blocks.first; --j, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();  // all have read the block before, which the next one overwrites
    if (j > blocks.first) issue(j - 1, stage ^ 1);
    float s[kKeys / 8][4], dp[kKeys / 8][4];
    multiply_transposed<kDim, kKeys>(s, q, 16 * warp_in_group(), base + Shape::kK, stage * kKeys);
    multiply_transposed<kDim, kKeys>(dp, d_o, 16 * warp_in_group(), base + Shape::kV, stage * kKeys);
    float(&ds)[kKeys / 2] = in_one(s);
    FW_UNROLL
    for (int i = 0; i < kKeys / 2; ++i)
      ds[i] = exp2_fast(fmaf(ds[i], scale, -lse[i % 4 / 2])) * (dp[i / 4][i % 4] - delta[i % 4 / 2]);
    if (!sight.sees_all(rows, 64, j * kKeys, kKeys)) {
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) {
        if (!sight.sees(query + i % 4 / 2 * 8, j * kKeys + accumulator_column(i))) ds[i] = 0.0f;
      }
    }
    uint32_t left[kKeys / 16][4];
    pack_fragments(ds, left);
    add_product<kDim, kKeys>(dq, left, base + Shape::kK, stage * kKeys);
  }
  float(&result)[kDim / 2] = in_one(dq);
  FW_UNROLL
  for (float& x : result) x *= args.scale;
  if (args.theta != 0) rotate_back<kDim>(result, rotations, position_of_first(args, tile) + query);
  leave<kDim>(result, args.dq, own.head, tile.query + rows, tile.queries - rows, args.dim,
              shared + Shape::kQ + worker * Shape::kHalf, kLeaveBarrier + worker);
}

template <int kDim>
void launch_queries(const AttentionArgs& args, void* stream) {
  launch_overlapped(sm80_attention_queries_kernel<kDim>, each_tile(args, args.heads), kWorkers,
                    QueryShape<kDim>::kShared, stream, args, RotaryShares(args.theta, args.dim));
}

}  // namespace

void sm80::attention_backward_queries(const AttentionArgs& args, void* stream) {
  for_sm80_dim(args.dim, [&]<int kDim>() { launch_queries<kDim>(args, stream); });
}

}  // namespace fw::cuda
