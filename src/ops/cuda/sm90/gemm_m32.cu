// A block has 128 rows of W and a slice of its columns, which it walks over 64 at a time. W is the left operand of
// warp-group products and x, 16 or 32 of its rows, the right one, so that the tokens are the short side. Up to
// eight blocks that share rows of W, one slice each, are a cluster. Each block sends the others their share of the rows
// of its sums. It adds up and stores its own share, in the order of the slices. TMA sends them (reads from one another
// took 2.6 us of 8 slices, and a cluster's barrier that shows what was written 2).
//
//   warps 0 to 3, 4 to 7    multiply the first and the last 64 rows of a stage; afterwards all join the sums, and a thread a block sends
//   warp 8, one lane        loads W [128, 64] and x [kTokens, 64] of a stage, as panels (tiles.h). Rows and columns that are not there are zeros
//   barriers                stages: full by bytes, empty by all workers; `joined` by the bytes of the other slices. Of the cluster: once no products read a
//                           stage, and once all have what was sent to them
//   shared memory           kStages stages, barriers; after the last stage, in the stages' memory, the sums by shares of blocks and those that come
//
// The weight does not change while a token is decoded, so a block asks for the W of all its first stages before the
// kernel before it is over, and for x after that. Two blocks share an SM, with about 128 KB of W on their way.
//
// Two products of ranks, which have few blocks and are over before they have begun, are one launch.
//
// With SwiGLU (kSwiglu) a block's rows are 64 of W's upper half and the 64 that belong to them of the lower.
#include <algorithm>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/sm80/fragments.cuh"
#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "gpu/tensor_map.h"
#include "ops/cuda/gemm_m32.h"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "ops/cuda/sm90/gemm_rows.cuh"

namespace fw::cuda {
namespace {

constexpr int kProductTile = 128, kStageColumns = 64;  // rows of W of a block; columns of a stage
constexpr int kProductWorkers = 256, kProductThreads = kProductWorkers + 32;
constexpr int kJoinBarrier = 1;

template <int kTokens>
struct GemmM32Shape {
  static constexpr int kX = 2 * kSw128Bytes, kStageBytes = kX + kTokens * 128;
  // of each of two blocks; a KB of each is the system's
  static constexpr int kBlockShared = (228 / 2 - 1) * 1024, kBarrierBytes = 128;
  static constexpr int kStages = (kBlockShared - kBarrierBytes) / kStageBytes;
  static constexpr int kBarriers = kStages * kStageBytes, kShared = kBarriers + kBarrierBytes;
  struct Barriers : RingBarriers<kStages> {
    uint64_t joined;
  };
  static_assert(kStageBytes % 1024 == 0 && sizeof(Barriers) <= kBarrierBytes);
};

// The sums of a block [slices, parts, kTokens, kShare], a share of the tile's outputs for each block of the cluster.
// After them those of the block's own share that the other slices send, [slices - 1, parts, kTokens, kShare]. Eights
// of outputs are exchanged by the token's number, so that lanes that write meet few banks (a gap from token to token
// would be sent, too).
template <int kTokens, int kSlices, bool kSwiglu>
struct SharesOf {
  static constexpr int kParts = kSwiglu ? 2 : 1, kOutputs = kProductTile / kParts, kShare = kOutputs / kSlices;
  static constexpr int kNumbers = kParts * kTokens * kShare, kBytes = 4 * kNumbers, kReceived = kSlices * kNumbers;
  static_assert((2 * kSlices - 1) * kBytes <= GemmM32Shape<kTokens>::kBarriers);
  static FW_DEVICE int exchanged(int token) { return (token >> 1 & ((kShare < 32 ? kShare : 32) / 8 - 1)) * 8; }
  static FW_DEVICE int at(int half, int token, int output) {
    return (half * kTokens + token) * kShare + (output ^ exchanged(token));
  }
  // Where a slice's sums of block `own`'s share lie in that block.
  static FW_DEVICE int of_slice(int slice, int own) {
    return slice == own ? own * kNumbers : kReceived + (slice < own ? slice : slice - 1) * kNumbers;
  }
};

// sums [64 rows of W, kTokens] += a panel of W times the transpose of that of x.
template <int kTokens>
FW_DEVICE void add_stage(float (&sums)[kTokens / 2], uint32_t weight, uint32_t x) {
  const uint64_t a = wgmma_descriptor(weight, 16, 1024), b = wgmma_descriptor(x, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kStageColumns / 16; ++k)
    wgmma_ss<kTokens, false, false>(sums, descriptor_after(a, 32 * k), descriptor_after(b, 32 * k), true);
}

// Four neighbouring sums of all slices, added up in their order.
template <class Shares, int kSlices>
FW_DEVICE void join_four(const float* sums, int own, int at, float (&sum)[4]) {
  FW_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    const float4 x = *reinterpret_cast<const float4*>(sums + Shares::of_slice(s, own) + at);
    sum[0] = s == 0 ? x.x : sum[0] + x.x, sum[1] = s == 0 ? x.y : sum[1] + x.y, sum[2] = s == 0 ? x.z : sum[2] + x.z,
    sum[3] = s == 0 ? x.w : sum[3] + x.w;
  }
}

template <int kTokens, int kSlices, bool kSwiglu>
FW_DEVICE void gemm_m32_tile(const GemmRowsArgs& a, const GemmRowsMaps& maps) {
  using Shape = GemmM32Shape<kTokens>;
  using Shares = SharesOf<kTokens, kSlices, kSwiglu>;
  constexpr int kStages = Shape::kStages;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.init(1, kProductWorkers);
    mbarrier_init(&barriers.joined, 1);
    mbarrier_init_fence();
    if constexpr (kSlices > 1) mbarrier_expect(&barriers.joined, (kSlices - 1) * Shares::kBytes);
  }
  sync_threads();
  constexpr int kOutputs = Shares::kOutputs, kShare = Shares::kShare;
  const int slice = static_cast<int>(block_index_x()) % kSlices,
            row = static_cast<int>(block_index_x()) / kSlices * kOutputs;
  const int first = a.stages * slice / kSlices, count = a.stages * (slice + 1) / kSlices - first;

  if (warp_index() == kProductWorkers / 32) {
    if (lane_index() == 0) {
      prefetch_map(maps.x);
      const auto issue_weight = [&](int i, int slot) {
        char* const to = shared + slot * Shape::kStageBytes;
        mbarrier_expect(barriers.full + slot, Shape::kStageBytes);
        tensor_load(to, maps.weight, (first + i) * kStageColumns, 0, row, 0, barriers.full + slot);
        tensor_load(to + kSw128Bytes, maps.weight, (first + i) * kStageColumns, 0, row + (kSwiglu ? a.out : 64), 0,
                    barriers.full + slot);
      };
      const auto issue_x = [&](int i, int slot) {
        tensor_load(shared + slot * Shape::kStageBytes + Shape::kX, maps.x, (first + i) * kStageColumns, 0, 0, 0,
                    barriers.full + slot);
      };
      const int ahead = min(count, kStages);
      FW_NO_UNROLL
      for (int i = 0; i < ahead; ++i) issue_weight(i, i);
      grid_dependency_wait();
      grid_dependency_launch();
      FW_NO_UNROLL
      for (int i = 0; i < ahead; ++i) issue_x(i, i);
      Ring<kStages> ring{0, 1};  // the second round
      FW_NO_UNROLL
      for (int i = kStages; i < count; ++i, ring.next()) {
        barriers.wait_empty(ring);
        issue_weight(i, ring.slot);
        issue_x(i, ring.slot);
      }
    }
    if constexpr (kSlices > 1) {
      sync_warp();  // barriers are for whole warps
      FW_UNROLL
      for (int i = 0; i < 2; ++i) cluster_arrive(), cluster_wait();
    }
    return;
  }

  // What the block stores: its share of the tile's outputs, of every token, four at a time. A thread's are all of the
  // same outputs.
  constexpr int kFours = kShare / 4, kTurns = (kTokens * kFours + kProductWorkers - 1) / kProductWorkers;
  const int thread = static_cast<int>(thread_index()), in_share = thread % kFours * 4,
            out_offset = slice * kShare + in_share;
  const int left = a.out - row - out_offset;
  const auto token_of = [&](int rotation) { return (rotation * kProductWorkers + thread) / kFours; };
  float bias[4] = {};
  if (a.bias != nullptr) {
    FW_UNROLL for (int i = 0; i < 4; ++i) bias[i] = i < left ? a.bias[row + out_offset + i] : 0.0f;
  }
  grid_dependency_wait();
  grid_dependency_launch();
  Packet<Bf16, 4> before[kTurns];
  if (a.addend != nullptr) {
    FW_UNROLL for (int rotation = 0; rotation < kTurns; ++rotation) {
      const int m = token_of(rotation);
      if (m < a.rows)
        before[rotation] = load_four(a.addend + m * a.addend_stride + row + out_offset, left, a.addend_whole != 0);
    }
  }

  const int group = shuffle(thread / 128, 0);
  const uint32_t base = shuffle(shared_address(shared), 0);
  float sums[kTokens / 2];
  FW_UNROLL
  for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
  Ring<kStages> ring, previous;
  FW_NO_UNROLL
  for (int i = 0; i < count; ++i) {
    barriers.wait_full(ring);
    const uint32_t stage = base + static_cast<uint32_t>(ring.slot * Shape::kStageBytes);
    wgmma_fence();
    add_stage<kTokens>(sums, stage + static_cast<uint32_t>(group * kSw128Bytes), stage + Shape::kX);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) barriers.put_empty(previous);
    previous = ring;
    ring.next();
  }
  wgmma_wait<0>();
  keep(sums);

  float* const parts = reinterpret_cast<float*>(shared);
  if constexpr (kSlices > 1) cluster_arrive();
  named_barrier_sync(kJoinBarrier, kProductWorkers);  // no product reads a stage any more
  {
    // The 16 rows of a warp are of one share, or of two. A lane's tokens are exchanged alike.
    const int lane = static_cast<int>(lane_index()), from = thread / 32 * 16, half = from / kOutputs,
              output = from % kOutputs;
    const int of_lane = output % kShare + lane / 4, token = 2 * (lane % 4);
    float* const mine = parts + output / kShare * Shares::kNumbers;
    const int at[2] = {Shares::at(half, token, of_lane), kShare >= 16
                                                             ? Shares::at(half, token, of_lane + 8)
                                                             : Shares::kNumbers + Shares::at(half, token, of_lane)};
    FW_UNROLL
    for (int i = 0; i < kTokens / 2; ++i) mine[at[i % 4 / 2] + (i / 4 * 8 + i % 2) * kShare] = sums[i];
  }
  if constexpr (kSlices > 1) fence_async_shared();
  named_barrier_sync(kJoinBarrier, kProductWorkers);
  if constexpr (kSlices > 1) {
    cluster_wait();  // nor does one of the other blocks
    if (thread < kSlices && thread != slice) {
      cluster_copy(parts + Shares::of_slice(slice, thread), thread, parts + thread * Shares::kNumbers, Shares::kBytes,
                   &barriers.joined);
    }
    mbarrier_wait(&barriers.joined, 0);
  }
  FW_UNROLL
  for (int rotation = 0; rotation < kTurns; ++rotation) {
    const int m = token_of(rotation);
    if (m >= a.rows || left <= 0) continue;
    float y[4];
    join_four<Shares, kSlices>(parts, slice, Shares::at(0, m, in_share), y);
    if constexpr (kSwiglu) {
      float factor[4];
      join_four<Shares, kSlices>(parts, slice, Shares::at(1, m, in_share), factor);
      FW_UNROLL for (int i = 0; i < 4; ++i) y[i] = y[i] * sigmoid(y[i]) * factor[i];
    } else {
      float more[4];
      before[rotation].get(more);
      FW_UNROLL for (int i = 0; i < 4; ++i) y[i] += bias[i] + more[i];
    }
    store_four(a.y + m * a.y_stride + row + out_offset, left, a.y_whole != 0, y);
  }
  if constexpr (kSlices > 1) cluster_arrive(), cluster_wait();  // all that this block has sent has come
}

template <int kTokens, int kSlices, bool kSwiglu>
__global__ void __launch_bounds__(kProductThreads, 2)
    gemm_m32_kernel(const GemmRowsArgs a, const __grid_constant__ GemmRowsMaps maps) {
  gemm_m32_tile<kTokens, kSlices, kSwiglu>(a, maps);
}
// Two products, one in y 0 and one in y 1.
struct GemmM32Pair {
  GemmRowsArgs of[2];
  GemmRowsMaps maps[2];
};
template <int kTokens>
__global__ void __launch_bounds__(kProductThreads, 2) gemm_m32_pair_kernel(const __grid_constant__ GemmM32Pair pair) {
  const GemmRowsArgs& a = pair.of[block_index_y()];
  if (static_cast<int>(block_index_x()) * kProductTile < a.out)
    gemm_m32_tile<kTokens, 1, false>(a, pair.maps[block_index_y()]);
}

template <int kTokens, int kSlices, bool kSwiglu>
void launch_slices(const GemmRowsArgs& a, const GemmRowsMaps& maps, void* stream) {
  const unsigned tiles = static_cast<unsigned>(parts_of(a.out, kSwiglu ? kProductTile / 2 : kProductTile));
  launch_overlapped_clusters(gemm_m32_kernel<kTokens, kSlices, kSwiglu>, Dim3{tiles * kSlices}, kSlices,
                             kProductThreads, GemmM32Shape<kTokens>::kShared, stream, a, maps);
}

template <int kTokens, bool kSwiglu>
void launch_tokens(int slices, const GemmRowsArgs& a, const GemmRowsMaps& maps, void* stream) {
  switch (slices) {
    case 1:
      return launch_slices<kTokens, 1, kSwiglu>(a, maps, stream);
    case 2:
      return launch_slices<kTokens, 2, kSwiglu>(a, maps, stream);
    case 4:
      return launch_slices<kTokens, 4, kSwiglu>(a, maps, stream);
    default:
      return launch_slices<kTokens, 8, kSwiglu>(a, maps, stream);
  }
}

int tokens_for(int64_t rows) { return rows <= 16 ? 16 : 32; }

// In a all that follows from x, the weight and y.
GemmRowsMaps make_maps(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, GemmRowsArgs& a) {
  if (!takes_gemm_m32(x, weight))
    fail_internal("gemm_m32: expected what takes_gemm_m32 takes, got {} rows of {} for {}", x.rows, x.cols,
                  weight.rows);
  set_rows(a, x, y, kStageColumns);
  GemmRowsMaps maps;
  if (!map_of(weight, 64, maps.weight) || !map_of(x, tokens_for(x.rows), maps.x))
    fail_internal("gemm_m32: no tensor map of [{}, {}]", weight.rows, x.cols);
  return maps;
}

// a: all but that.
template <bool kSwiglu>
void launch_for(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, GemmRowsArgs a, void* stream) {
  const GemmRowsMaps maps = make_maps(x, weight, y, a);
  const int tokens = tokens_for(x.rows), slices = gemm_m32_slices(weight.rows, x.cols);
  tokens == 16 ? launch_tokens<16, kSwiglu>(slices, a, maps, stream)
               : launch_tokens<32, kSwiglu>(slices, a, maps, stream);
}

}  // namespace

bool takes_gemm_m32(Mat<const Bf16> x, Mat<const Bf16> weight) {
  return x.rows <= kGemmM32MaxM && takes_gemm_m64(x, weight);
}

// As few as leave three of four SMs of a large device a block each, since sums that meet cost time, and four stages or
// more in a slice.
int gemm_m32_slices(int64_t out, int64_t in) {
  constexpr int kEnoughBlocks = 96, kMostSlices = 8, kLeastStages = 4;
  int slices = 1;
  while (slices < kMostSlices && parts_of(out, kProductTile) * slices < kEnoughBlocks &&
         parts_of(in, kStageColumns) >= 2 * slices * kLeastStages)
    slices *= 2;
  return slices;
}

void gemm_m32_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     void* stream) {
  launch_for<false>(x, weight, y, linear_args(weight.rows, bias, addend), stream);
}

bool gemm_m32_pair(const LinearPart<Bf16>& first, const LinearPart<Bf16>& second, void* stream) {
  GemmM32Pair pair;
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const LinearPart<Bf16>& of = i == 0 ? first : second;
    const Mat<const Bf16> weight = operand<Bf16>(of.weight);
    if (!takes_gemm_m32(of.x, weight) || gemm_m32_slices(weight.rows, of.x.cols) > 1) return false;
    pair.of[i].bias = of.bias;
    pair.of[i].out = static_cast<int>(weight.rows);
    pair.maps[i] = make_maps(of.x, weight, of.y, pair.of[i]);
    tiles = std::max(tiles, parts_of(weight.rows, kProductTile));
  }
  const Dim3 grid{static_cast<unsigned>(tiles), 2};
  const auto run = [&]<int kTokens>() {
    launch_overlapped(gemm_m32_pair_kernel<kTokens>, grid, kProductThreads, GemmM32Shape<kTokens>::kShared, stream,
                      pair);
  };
  tokens_for(first.x.rows) == 16 ? run.template operator()<16>() : run.template operator()<32>();
  return true;
}

void gemm_m32_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, void* stream) {
  GemmRowsArgs a;
  a.out = static_cast<int>(y.cols);
  launch_for<true>(x, weight, y, a, stream);
}

}  // namespace fw::cuda
