// Attention backward without Hopper's instructions, second pass: dV = P^T dO and dK = scale dS^T Q with dS = P (dO V^T
// - delta), P = exp2(scale' S - lse), of what the first pass made. A block has a tile of 128 keys of one key head, 16 a
// warp. For each head of its group it walks over blocks of 32 queries, from the first that sees any of the keys.
//
//   shared memory   K [2][64, D] and V [2][64, D], where dK and dV leave through; Q [64, D] and dO [64, D], each two stages of 32 rows;
//                   lse and delta [2 stages][2][32]
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kQueries = 32;  // of a block

template <int kDim>
struct KeyShape {
  static constexpr int kHalf = kHalfBytes<kDim>;
  static constexpr int kK = 0, kV = 2 * kHalf, kQ = 4 * kHalf, kGradient = kQ + kHalf, kNumbers = kGradient + kHalf,
                       kShared = kNumbers + 2 * 2 * kQueries * 4;
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1)
    sm80_attention_keys_kernel(const AttentionArgs args, const __grid_constant__ RotaryShares rotations) {
  using Shape = KeyShape<kDim>;
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  grid_dependency_wait();
  const OwnTile own(args, args.kv_heads);
  const AttentionTile& tile = own.tile;
  const int worker = static_cast<int>(warp_index()) / 4, thread = static_cast<int>(thread_index());
  const float scale = args.scale * kLog2E;
  const Sight sight(tile, args.window);
  const int rows = tile.first + 64 * worker, key = tile.first + worker_row(worker);
  float* const numbers = reinterpret_cast<float*>(shared + Shape::kNumbers);
  // Block i of a head to a stage, and the number of it that the thread is to put there.
  const auto issue = [&](int head, int i, int stage) {
    const auto bring = [&](const TokenArg& from, int to) {
      copy_rows<kDim>(from, head, tile.query + i * kQueries, tile.queries - i * kQueries, args.dim,
                      base + static_cast<uint32_t>(to), stage * kQueries, kQueries);
    };
    bring(args.q, Shape::kQ), bring(args.d_o, Shape::kGradient);
    cp_async_commit();
    const int query = i * kQueries + thread % kQueries;
    if (thread >= 2 * kQueries || query >= tile.queries) return 0.0f;
    return (thread < kQueries ? args.lse : args.delta)[head * args.query_rows + tile.query + query];
  };
  const auto put_number = [&](float number, int stage) {
    if (thread < 2 * kQueries) numbers[stage * 2 * kQueries + thread] = number;
  };
  const auto bring_rows = [&](const TokenArg& from, int to) {
    copy_rows<kDim>(from, own.head, tile.key + tile.first, tile.keys - tile.first, args.dim,
                    base + static_cast<uint32_t>(to), 0, kAttentionRows);
  };
  bring_rows(args.k, Shape::kK), bring_rows(args.v, Shape::kV);
  cp_async_commit();

  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  const uint32_t k = base + static_cast<uint32_t>(Shape::kK + worker * Shape::kHalf),
                 v = base + static_cast<uint32_t>(Shape::kV + worker * Shape::kHalf);
  // A block is computed while the next one is loaded.
  const auto compute = [&](int i, int stage) {
    float s[kQueries / 8][4], dp[kQueries / 8][4];  // of keys (rows) and queries (columns)
    multiply_transposed<kDim, kQueries>(s, k, 16 * warp_in_group(), base + Shape::kQ, stage * kQueries);
    multiply_transposed<kDim, kQueries>(dp, v, 16 * warp_in_group(), base + Shape::kGradient, stage * kQueries);
    const float* const lse = numbers + stage * 2 * kQueries + 2 * (lane_index() % 4);
    FW_UNROLL
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(lse + 8 * n);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) s[n][m] = exp2_fast(fmaf(s[n][m], scale, m % 2 == 0 ? -of.x : -of.y));
    }
    float(&p)[kQueries / 2] = in_one(s);
    if (!sight.sees_all(i * kQueries, kQueries, rows, 64)) {
      FW_UNROLL
      for (int n = 0; n < kQueries / 2; ++n) {
        if (!sight.sees(i * kQueries + accumulator_column(n), key + n % 4 / 2 * 8)) p[n] = 0.0f;
      }
    }
    uint32_t left[kQueries / 16][4];
    pack_fragments(p, left);
    add_product<kDim, kQueries>(dv, left, base + Shape::kGradient, stage * kQueries);
    FW_UNROLL
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(lse + kQueries + 8 * n);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) s[n][m] *= dp[n][m] - (m % 2 == 0 ? of.x : of.y);
    }
    pack_fragments(p, left);
    add_product<kDim, kQueries>(dk, left, base + Shape::kQ, stage * kQueries);
  };
  int before = -1, stage = 0;  // the block that is loaded
  const auto take = [&](bool more, int head, int i) {
    cp_async_wait<0>();
    sync_threads();  // it is there for all, and all have read the one before, which the next one overwrites
    const float number = more ? issue(head, i, stage ^ 1) : 0.0f;
    compute(before, stage);
    if (more) put_number(number, stage ^ 1);
    stage ^= 1;
  };
  for_query_blocks<kQueries>(args, tile, own.head, [&](int head, int i) {
    if (before < 0) {
      put_number(issue(head, i, 0), 0);
    } else {
      take(true, head, i);
    }
    before = i;
  });
  if (before >= 0) take(false, 0, 0);
  cp_async_wait<0>();  // where no query sees the keys, whose gradients are zeros

  float(&keys)[kDim / 2] = in_one(dk);
  FW_UNROLL
  for (float& x : keys) x *= args.scale;
  if (args.theta != 0) rotate_back<kDim>(keys, rotations, position_of_first(args, tile) + key - sight.offset);
  const int row = tile.key + rows, valid = tile.keys - rows;
  leave<kDim>(keys, args.dk, own.head, row, valid, args.dim, shared + Shape::kK + worker * Shape::kHalf,
              kLeaveBarrier + worker);
  leave<kDim>(in_one(dv), args.dv, own.head, row, valid, args.dim, shared + Shape::kV + worker * Shape::kHalf,
              kLeaveBarrier + worker);
}

template <int kDim>
void launch_keys(const AttentionArgs& args, void* stream) {
  launch_overlapped(sm80_attention_keys_kernel<kDim>, each_tile(args, args.kv_heads), kWorkers, KeyShape<kDim>::kShared,
                    stream, args, RotaryShares(args.theta, args.dim));
}

}  // namespace

void sm80::attention_backward_keys(const AttentionArgs& args, void* stream) {
  for_sm80_dim(args.dim, [&]<int kDim>() { launch_keys<kDim>(args, stream); });
}

}  // namespace fw::cuda
