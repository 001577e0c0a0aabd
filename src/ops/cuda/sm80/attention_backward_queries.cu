// Attention backward without Hopper's instructions, first pass: delta = rowsum(O dO) and dQ = scale dS K with dS = P
// (dO V^T - delta), P = exp2(scale' S - lse). A block has a tile of 128 queries of one head, 16 a warp, and walks over
// blocks of 32 keys, from the last that any of them sees to the first.
//
// Above 128 channels a block has 64 queries, 16 a pair. One warp holds Q's fragments, makes S and hands over P; the
// other one holds those of dO, makes dO V^T and hands over dS. Each makes half of dQ's channels.
//
//   shared memory   Q [2][64, D], where dQ leaves through; dO [2][64, D]; K [64, D] and V [64, D], each two stages of 32 rows; delta
//                   above 128 channels: K and V, which Q, dO and dQ pass through; delta; P [4 pairs], where dS follows
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kKeys = 32;  // of a block

template <int kDim>
struct QueryShape {
  static constexpr int kHalf = kHalfBytes<kDim>, kRows = kBackwardRows<kDim>, kMatrix = kRows / 64 * kHalf;
  static constexpr int kQ = 0, kGradient = kMatrix, kK = kPaired<kDim> ? kQ : 2 * kMatrix, kV = kK + kHalf,
                       kDelta = kV + kHalf, kExchange = kDelta + kRows * 4, kOfPair = kPairBytes<kKeys / 8>,
                       kShared = kExchange + (kPaired<kDim> ? 4 * kOfPair : 0);
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1)
    sm80_attention_queries_kernel(const AttentionArgs args, const __grid_constant__ RotaryShares rotations) {
  using Shape = QueryShape<kDim>;
  constexpr bool kPairs = kPaired<kDim>;
  constexpr int kColumns = kPart<kDim>;  // of dQ, that a warp makes
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  grid_dependency_wait();
  const OwnTile<Shape::kRows> own(args, args.heads);
  const AttentionTile& tile = own.tile;
  if (kPairs && tile.first >= tile.queries) return;
  const int worker = static_cast<int>(warp_index()) / 4, kv_head = own.head / (args.heads / args.kv_heads);
  const float scale = args.scale * kLog2E;
  const Sight sight(tile, args.window);
  const KeyBlocks<kKeys, Shape::kRows> blocks(args, tile);
  const int half = kPairs ? 0 : worker, rows = tile.first + 64 * half, query = tile.first + worker_row(half);
  const auto issue = [&](int j, int stage) {
    const auto bring = [&](const TokenArg& from, int to) {
      copy_rows<kDim, kKeys>(from, kv_head, tile.key + j * kKeys, sight.keys - j * kKeys, args.dim,
                             base + static_cast<uint32_t>(to), stage * kKeys);
    };
    bring(args.k, Shape::kK), bring(args.v, Shape::kV);
    cp_async_commit();
  };
  const auto bring_rows = [&](const TokenArg& from, int to) {
    copy_rows<kDim, Shape::kRows>(from, own.head, tile.query + tile.first, tile.queries - tile.first, args.dim,
                                  base + static_cast<uint32_t>(to), 0);
  };
  bring_rows(args.q, Shape::kQ), bring_rows(args.d_o, Shape::kGradient);
  cp_async_commit();
  if constexpr (!kPairs) issue(blocks.last, 0);

  cp_async_wait<kPairs ? 0 : 1>();
  sync_threads();
  const bool has_q = worker == 0;  // of a pair
  const int q = Shape::kQ + half * Shape::kHalf, d_o = Shape::kGradient + half * Shape::kHalf;
  float* const delta_rows = reinterpret_cast<float*>(shared + Shape::kDelta) + 64 * half;
  if (!kPairs || !has_q) make_delta<kDim>(args, tile, own.head, rows, shared + d_o, delta_rows);
  sync_warp();  // a warp's own rows
  using Rows = std::conditional_t<kPairs, HeldRows<kDim / 16>, SharedRows>;
  const Rows held(base + static_cast<uint32_t>(!kPairs || has_q ? q : d_o), 16 * warp_in_group());
  if constexpr (kPairs) {
    sync_threads();  // K and V come where these were
    issue(blocks.last, 0);
  }
  const int row = 16 * warp_in_group() + static_cast<int>(lane_index()) / 4;
  float lse[2], delta[2];
  FW_UNROLL
  for (int h = 0; h < 2; ++h) {
    lse[h] =
        query + 8 * h < tile.queries ? args.lse[own.head * args.query_rows + tile.query + query + 8 * h] : INFINITY;
    delta[h] = delta_rows[row + 8 * h];
  }

  const auto to_probabilities = [&](float(&s)[kKeys / 8][4]) {
    FW_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) in_one(s)[i] = exp2_fast(fmaf(in_one(s)[i], scale, -lse[i % 4 / 2]));
  };
  // P becomes dS of block j, as fragments.
  const auto to_gradients = [&](float(&p)[kKeys / 8][4], float(&dp)[kKeys / 8][4], int j,
                                uint32_t(&left)[kKeys / 16][4]) {
    float(&ds)[kKeys / 2] = in_one(p);
    FW_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) ds[i] *= in_one(dp)[i] - delta[i % 4 / 2];
    if (!sight.sees_all(rows, 64, j * kKeys, kKeys)) {
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) {
        if (!sight.sees(query + i % 4 / 2 * 8, j * kKeys + accumulator_column(i))) ds[i] = 0.0f;
      }
    }
    pack_fragments(ds, left);
  };
  float dq[kColumns / 8][4] = {};
  int stage = 0;
  FW_NO_UNROLL
  for (int j = blocks.last; j >= blocks.first; --j, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();  // all have read the block before, which the next one overwrites
    if (j > blocks.first) issue(j - 1, stage ^ 1);
    float s[kKeys / 8][4];
    uint32_t left[kKeys / 16][4];
    if constexpr (kPairs) {
      char* const pair = shared + Shape::kExchange + warp_in_group() * Shape::kOfPair;
      multiply_transposed<kDim, kKeys>(s, held, base + static_cast<uint32_t>(has_q ? Shape::kK : Shape::kV),
                                       stage * kKeys);
      if (has_q) {
        to_probabilities(s);
        give_lanes(pair, s);
        pair_sync();
        pair_sync();
        take_lanes(pair, left);
      } else {
        float p[kKeys / 8][4];
        pair_sync();
        take_lanes(pair, p);
        to_gradients(p, s, j, left);
        give_lanes(pair, left);  // a lane over what it has taken
        pair_sync();
      }
    } else {
      float dp[kKeys / 8][4];
      multiply_transposed<kDim, kKeys>(s, held, base + Shape::kK, stage * kKeys);
      multiply_transposed<kDim, kKeys>(dp, SharedRows(base + static_cast<uint32_t>(d_o), 16 * warp_in_group()),
                                       base + Shape::kV, stage * kKeys);
      to_probabilities(s);
      to_gradients(s, dp, j, left);
    }
    add_product<kColumns, kKeys>(dq, left,
                                 base + static_cast<uint32_t>(Shape::kK + (kPairs ? worker * kHalfBytes<kColumns> : 0)),
                                 stage * kKeys);
  }
  float(&result)[kColumns / 2] = in_one(dq);
  FW_UNROLL
  for (float& x : result) x *= args.scale;
  if constexpr (kPairs) {
    sync_threads();  // dQ leaves where keys were
  } else {
    if (args.theta != 0) rotate_back<kDim>(result, rotations, position_of_first(args, tile) + query);
  }
  const int channel = kPairs ? worker * kColumns : 0;
  leave<kColumns>(result, from_channel(args.dq, channel), own.head, tile.query + rows, tile.queries - rows,
                  args.dim - channel, shared + Shape::kQ + worker * kHalfBytes<kColumns>, kLeaveBarrier + worker);
}

template <int kDim>
void launch_queries(const AttentionArgs& args, void* stream) {
  launch_overlapped(sm80_attention_queries_kernel<kDim>, each_tile<QueryShape<kDim>::kRows>(args, args.heads), kWorkers,
                    QueryShape<kDim>::kShared, stream, args, RotaryShares(args.theta, args.dim));
}

}  // namespace

void sm80::attention_backward_queries(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_queries<kDim>(args, stream); });
}

}  // namespace fw::cuda
