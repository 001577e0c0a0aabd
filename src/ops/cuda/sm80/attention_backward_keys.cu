// Attention backward without Hopper's instructions, second pass: dV = P^T dO and dK = scale dS^T Q with dS = P (dO V^T
// - delta), P = exp2(scale' S - lse), of what the first pass made. A block has a tile of 128 keys of one key head, 16 a
// warp. For each head of its group it walks over blocks of 32 queries, from the first that sees any of the keys.
//
// Above 128 channels a block has 64 keys, 16 a pair. One warp holds K's fragments, makes S, hands over P and makes dV;
// the other one holds those of V and makes dO V^T and dK.
//
//   shared memory   K [2][64, D] and V [2][64, D], where dK and dV leave through; Q [64, D] and dO [64, D], each two stages of 32 rows;
//                   lse and delta [2 stages][2][32]
//                   above 128 channels: Q and dO, which K, V, dK and dV pass through; lse and delta; P [4 pairs]
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kQueries = 32;  // of a block

template <int kDim>
struct KeyShape {
  static constexpr int kHalf = kHalfBytes<kDim>, kRows = kBackwardRows<kDim>, kMatrix = kRows / 64 * kHalf;
  static constexpr int kK = 0, kV = kMatrix, kQ = kPaired<kDim> ? kK : 2 * kMatrix, kGradient = kQ + kHalf,
                       kNumbers = kGradient + kHalf, kExchange = kNumbers + 2 * 2 * kQueries * 4,
                       kOfPair = kPairBytes<kQueries / 8>, kShared = kExchange + (kPaired<kDim> ? 4 * kOfPair : 0);
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1)
    sm80_attention_keys_kernel(const AttentionArgs args, const __grid_constant__ RotaryShares rotations) {
  using Shape = KeyShape<kDim>;
  constexpr bool kPairs = kPaired<kDim>;
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  grid_dependency_wait();
  const OwnTile<Shape::kRows> own(args, args.kv_heads);
  const AttentionTile& tile = own.tile;
  if (kPairs && tile.first >= tile.keys) return;
  const int worker = static_cast<int>(warp_index()) / 4, thread = static_cast<int>(thread_index());
  const float scale = args.scale * kLog2E;
  const Sight sight(tile, args.window);
  const int half = kPairs ? 0 : worker, rows = tile.first + 64 * half, key = tile.first + worker_row(half);
  float* const numbers = reinterpret_cast<float*>(shared + Shape::kNumbers);
  // Block i of a head to a stage, and the number of it that the thread is to put there.
  const auto issue = [&](int head, int i, int stage) {
    const auto bring = [&](const TokenArg& from, int to) {
      copy_rows<kDim, kQueries>(from, head, tile.query + i * kQueries, tile.queries - i * kQueries, args.dim,
                                base + static_cast<uint32_t>(to), stage * kQueries);
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
    copy_rows<kDim, Shape::kRows>(from, own.head, tile.key + tile.first, tile.keys - tile.first, args.dim,
                                  base + static_cast<uint32_t>(to), 0);
  };
  bring_rows(args.k, Shape::kK), bring_rows(args.v, Shape::kV);
  cp_async_commit();

  if constexpr (kPairs) {
    cp_async_wait<0>();
    sync_threads();
  }
  const bool has_k = worker == 0;  // of a pair
  const int k = Shape::kK + half * Shape::kHalf, v = Shape::kV + half * Shape::kHalf;
  using Rows = std::conditional_t<kPairs, HeldRows<kDim / 16>, SharedRows>;
  const Rows held(base + static_cast<uint32_t>(!kPairs || has_k ? k : v), 16 * warp_in_group());
  if constexpr (kPairs) sync_threads();  // Q and dO come where these were

  float sums[kPairs ? 1 : 2][kDim / 8][4] = {};
  float(&dv)[kDim / 8][4] = sums[0], (&dk)[kDim / 8][4] = sums[kPairs ? 0 : 1];
  // Of keys (rows) and queries (columns). lse: of this lane's first query, and delta kQueries numbers further.
  const auto to_probabilities = [&](float(&s)[kQueries / 8][4], int i, const float* lse) {
    FW_UNROLL
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(lse + 8 * n);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) s[n][m] = exp2_fast(fmaf(s[n][m], scale, m % 2 == 0 ? -of.x : -of.y));
    }
    if (!sight.sees_all(i * kQueries, kQueries, rows, 64)) {
      FW_UNROLL
      for (int n = 0; n < kQueries / 2; ++n) {
        if (!sight.sees(i * kQueries + accumulator_column(n), key + n % 4 / 2 * 8)) in_one(s)[n] = 0.0f;
      }
    }
  };
  // dO V^T becomes dS.
  const auto to_gradients = [&](const float(&p)[kQueries / 8][4], float(&dp)[kQueries / 8][4], const float* lse) {
    FW_UNROLL
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(lse + kQueries + 8 * n);
      FW_UNROLL
      for (int m = 0; m < 4; ++m) dp[n][m] = p[n][m] * (dp[n][m] - (m % 2 == 0 ? of.x : of.y));
    }
  };
  // sum += s times the block of Q or dO.
  const auto add = [&](float(&sum)[kDim / 8][4], float(&s)[kQueries / 8][4], int block, int stage) {
    uint32_t left[kQueries / 16][4];
    pack_fragments(in_one(s), left);
    add_product<kDim, kQueries>(sum, left, base + static_cast<uint32_t>(block), stage * kQueries);
  };
  // A block is computed while the next one is loaded.
  const auto compute = [&](int i, int stage) {
    float p[kQueries / 8][4], dp[kQueries / 8][4];
    const float* const lse = numbers + stage * 2 * kQueries + 2 * (lane_index() % 4);
    if constexpr (kPairs) {
      char* const pair = shared + Shape::kExchange + warp_in_group() * Shape::kOfPair;
      float(&s)[kQueries / 8][4] = dp;
      multiply_transposed<kDim, kQueries>(s, held, base + static_cast<uint32_t>(has_k ? Shape::kQ : Shape::kGradient),
                                          stage * kQueries);
      if (has_k) {
        to_probabilities(s, i, lse);
        give_lanes(pair, s);  // what was given before has been taken: all have met since then
        pair_arrive();
      } else {
        pair_sync();
        take_lanes(pair, p);
        to_gradients(p, s, lse);
      }
      add(sums[0], s, has_k ? Shape::kGradient : Shape::kQ, stage);
    } else {
      multiply_transposed<kDim, kQueries>(p, held, base + Shape::kQ, stage * kQueries);
      multiply_transposed<kDim, kQueries>(dp, SharedRows(base + static_cast<uint32_t>(v), 16 * warp_in_group()),
                                          base + Shape::kGradient, stage * kQueries);
      to_probabilities(p, i, lse);
      add(dv, p, Shape::kGradient, stage);
      to_gradients(p, dp, lse);
      add(dk, dp, Shape::kQ, stage);
    }
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
  for_query_blocks<kQueries, Shape::kRows>(args, tile, own.head, [&](int head, int i) {
    if (before < 0) {
      put_number(issue(head, i, 0), 0);
    } else {
      take(true, head, i);
    }
    before = i;
  });
  if (before >= 0) take(false, 0, 0);
  cp_async_wait<0>();  // where no query sees the keys, whose gradients are zeros

  if constexpr (kPairs) sync_threads();  // dK and dV leave where queries were
  const int row = tile.key + rows, valid = tile.keys - rows;
  if (!kPairs || !has_k) {
    float(&keys)[kDim / 2] = in_one(dk);
    FW_UNROLL
    for (float& x : keys) x *= args.scale;
    if constexpr (!kPairs) {
      if (args.theta != 0) rotate_back<kDim>(keys, rotations, position_of_first(args, tile) + key - sight.offset);
    }
    leave<kDim>(keys, args.dk, own.head, row, valid, args.dim, shared + k, kLeaveBarrier + worker);
  }
  if (!kPairs || has_k)
    leave<kDim>(in_one(dv), args.dv, own.head, row, valid, args.dim, shared + v, kLeaveBarrier + worker);
}

template <int kDim>
void launch_keys(const AttentionArgs& args, void* stream) {
  launch_overlapped(sm80_attention_keys_kernel<kDim>, each_tile<KeyShape<kDim>::kRows>(args, args.kv_heads), kWorkers,
                    KeyShape<kDim>::kShared, stream, args, RotaryShares(args.theta, args.dim));
}

}  // namespace

void sm80::attention_backward_keys(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_keys<kDim>(args, stream); });
}

}  // namespace fw::cuda
