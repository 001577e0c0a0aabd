// Attention forward without Hopper's instructions. A block has a tile of 128 queries of one head, 16 a warp, whose
// fragments stay in registers up to 128 channels. It walks over blocks of 64 keys from the last that any of them sees
// to the first: S = Q K^T, softmax, O += P V.
//
// Matrices [64 keys, P] come two at a time, K and V of a block; of 256 channels one at a time, two of K and two of V.
//
//   shared memory   Q [2][64, D], where O leaves through; two stages of such matrices
#include "ops/cuda/sm80/attention_parts.cuh"

namespace fw::cuda {
namespace {

constexpr int kKeys = 64;  // of a block

template <int kDim>
struct ForwardShape {
  static constexpr int kHalf = kHalfBytes<kDim>, kMatrix = kHalfBytes<kPart<kDim>>;
  // Matrices of a block of keys, first those of K, and how many come at a time.
  static constexpr int kParts = kDim / kPart<kDim>, kMatrices = 2 * kParts, kTogether = kParts == 1 ? 2 : 1;
  static constexpr int kQ = 0, kRing = 2 * kHalf, kShared = kRing + 2 * kTogether * kMatrix;
  static_assert(kShared <= kSm80SharedBytes);
};

template <int kDim>
__global__ void __launch_bounds__(kWorkers, 1) sm80_attention_forward_kernel(const AttentionArgs args) {
  using Shape = ForwardShape<kDim>;
  constexpr int kColumns = kPart<kDim>, kParts = Shape::kParts;
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  grid_dependency_wait();
  const OwnTile<kAttentionRows> own(args, args.heads);
  const AttentionTile& tile = own.tile;
  const int worker = static_cast<int>(warp_index()) / 4, kv_head = own.head / (args.heads / args.kv_heads);
  const float scale = args.scale * kLog2E;
  const Sight sight(tile, args.window);
  const KeyBlocks<kKeys> blocks(args, tile);
  const int rows = tile.first + 64 * worker, query = tile.first + worker_row(worker);
  const auto slot = [&](int stage, int i) {
    return base + static_cast<uint32_t>(Shape::kRing + (stage * Shape::kTogether + i) * Shape::kMatrix);
  };
  // Matrix `first` of block j and those that come with it.
  const auto issue = [&](int j, int first, int stage) {
    FW_UNROLL
    for (int i = 0; i < Shape::kTogether; ++i) {
      const int channel = (first + i) % kParts * kColumns;
      copy_rows<kColumns, kKeys>(from_channel(first + i < kParts ? args.k : args.v, channel), kv_head,
                                 tile.key + j * kKeys, sight.keys - j * kKeys, args.dim - channel, slot(stage, i), 0);
    }
    cp_async_commit();
  };
  copy_rows<kDim, kAttentionRows>(args.q, own.head, tile.query + tile.first, tile.queries - tile.first, args.dim,
                                  base + Shape::kQ, 0);
  cp_async_commit();
  issue(blocks.last, 0, 0);

  cp_async_wait<1>();
  sync_threads();
  const std::conditional_t<kParts == 1, HeldRows<kDim / 16>, SharedRows> q(
      base + static_cast<uint32_t>(Shape::kQ + worker * Shape::kHalf), 16 * warp_in_group());
  float o[kDim / 8][4] = {};
  Softmax softmax;
  int stage = 0;
  FW_NO_UNROLL
  for (int j = blocks.last; j >= blocks.first; --j) {
    // Matrix i of the block. Those that come next begin to.
    const auto matrix = [&](int i) {
      if (i % Shape::kTogether == 0) {
        cp_async_wait<0>();
        sync_threads();  // all have read the matrices before, which the next ones overwrite
        const int next = i + Shape::kTogether;
        if (next < Shape::kMatrices) {
          issue(j, next, stage ^ 1);
        } else if (j > blocks.first) {
          issue(j - 1, 0, stage ^ 1);
        }
        stage ^= 1;
      }
      return slot(stage ^ 1, i % Shape::kTogether);
    };
    float s[kKeys / 8][4] = {}, factor[2];
    FW_UNROLL
    for (int part = 0; part < kParts; ++part) add_transposed<kColumns, kKeys>(s, q, part * kColumns, matrix(part), 0);
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
    FW_UNROLL
    for (int part = 0; part < kParts; ++part)
      add_product<kColumns, kKeys>(part_of<kColumns>(o, part), p, matrix(kParts + part), 0);
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
  launch_overlapped(sm80_attention_forward_kernel<kDim>, each_tile<kAttentionRows>(args, args.heads), kWorkers,
                    ForwardShape<kDim>::kShared, stream, args);
}

}  // namespace

void sm80::attention_forward(const AttentionArgs& args, void* stream) {
  for_dim(args.dim, [&]<int kDim>() { launch_forward<kDim>(args, stream); });
}

}  // namespace fw::cuda
