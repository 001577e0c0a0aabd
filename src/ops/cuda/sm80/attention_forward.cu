// Attention forward without Hopper's instructions. A block has a tile of 128 queries of one head, 16 a warp, whose
// fragments stay in registers. It walks over blocks of 64 keys from the last that any of them sees to the first: S = Q
// K^T, softmax, O += P V.
//
//   shared memory   Q [2][64, D], where O leaves through; K [2 stages][64, D], V [2 stages][64, D]
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kKeys = 64;  // of a block

template <int kDim>
struct ForwardShape {
  static constexpr int kHalf = kHalfBytes<kDim>;
  static constexpr int kQ = 0, kK = 2 * kHalf, kV = kK + 2 * kHalf, kShared = kV + 2 * kHalf;
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1) sm80_attention_forward_kernel(const AttentionArgs args) {
  using Shape = ForwardShape<kDim>;
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
                      base + static_cast<uint32_t>(to + stage * Shape::kHalf), 0, kKeys);
    };
    bring(args.k, Shape::kK), bring(args.v, Shape::kV);
    cp_async_commit();
  };
  copy_rows<kDim>(args.q, own.head, tile.query + tile.first, tile.queries - tile.first, args.dim, base + Shape::kQ, 0,
                  kAttentionRows);
  cp_async_commit();
  issue(blocks.last, 0);

  cp_async_wait<1>();
  sync_threads();
  uint32_t q[kDim / 16][4];
  FW_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    ldmatrix_x4(
        q[k], a_fragment(base + static_cast<uint32_t>(Shape::kQ + worker * Shape::kHalf), 16 * warp_in_group(), 2 * k));
  }
  float o[kDim / 8][4] = {};
  Softmax softmax;
  int stage = 0;
  FW_NO_UNROLL
  for (int j = blocks.last; j >= blocks.first; --j, stage ^= 1) {
    cp_async_wait<0>();
    sync_threads();  // all have read the block before, which the next one overwrites
    if (j > blocks.first) issue(j - 1, stage ^ 1);
    const uint32_t keys = base + static_cast<uint32_t>(Shape::kK + stage * Shape::kHalf),
                   values = base + static_cast<uint32_t>(Shape::kV + stage * Shape::kHalf);
    float s[kKeys / 8][4] = {}, factor[2];
    FW_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      FW_UNROLL
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t right[4];
        ldmatrix_x4(right, b_fragment(keys, 16 * n, 2 * k));
        mma_bf16(s[2 * n], q[k], right[0], right[1]);
        mma_bf16(s[2 * n + 1], q[k], right[2], right[3]);
      }
    }
    float(&scores)[kKeys / 2] = in_one(s);
    if (!sight.sees_all(rows, 64, j * kKeys, kKeys)) {
      FW_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) {
        if (!sight.sees(query + i % 4 / 2 * 8, j * kKeys + accumulator_column(i))) scores[i] = -INFINITY;
      }
    }
    softmax.step(scores, scale, factor);
    uint32_t p[kKeys / 16][4];
    pack_fragments(scores, p);
    FW_UNROLL
    for (int n = 0; n < kDim / 8; ++n) {
      FW_UNROLL
      for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
    }
    add_product<kDim, kKeys>(o, p, values, 0);
  }
  softmax.finish();
  const float inverse[2] = {1.0f / softmax.sum[0], 1.0f / softmax.sum[1]};
  FW_UNROLL
  for (int n = 0; n < kDim / 8; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) o[n][i] *= inverse[i / 2];
  }
  if (args.lse != nullptr && lane_index() % 4 == 0) {
    FW_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (query + 8 * h < tile.queries)
        args.lse[own.head * args.query_rows + tile.query + query + 8 * h] =
            fmaf(softmax.top[h], scale, log2f(softmax.sum[h]));
    }
  }
  leave<kDim>(in_one(o), args.o, own.head, tile.query + rows, tile.queries - rows, args.dim,
              shared + Shape::kQ + worker * Shape::kHalf, kLeaveBarrier + worker);
}

template <int kDim>
void launch_forward(const AttentionArgs& args, void* stream) {
  launch_overlapped(sm80_attention_forward_kernel<kDim>, each_tile(args, args.heads), kWorkers,
                    ForwardShape<kDim>::kShared, stream, args);
}

}  // namespace

void sm80::attention_forward(const AttentionArgs& args, void* stream) {
  for_sm80_dim(args.dim, [&]<int kDim>() { launch_forward<kDim>(args, stream); });
}

}  // namespace fw::cuda
