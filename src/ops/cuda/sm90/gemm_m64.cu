// A block has kRows rows of W and a slice of its columns, which it walks over 64 at a time. x, all 64 of its rows, is
// the left operand of warp-group products, so that the rows of W may be any multiple of 16: as many as leave each SM of
// a large device two blocks. Two warpgroups take the stages in turn.
//
// Blocks of a cluster share x. kSharers of them, with rows of W of their own, bring a share of x's rows each and send
// it to all. Where columns are in slices, the cluster also has the other slices' blocks of the same rows. Each sends
// the others their share of its sums, adds up its own share in the order of the slices, and stores it.
//
//   warps 0 to 3, 4 to 7    multiply even and odd stages. Afterwards all add up the sums, and a thread a block sends
//   warp 8, one lane        loads W [kRows, 64] and its share of x [64, 64] of a stage, as SW128 tiles. Rows and
//                           columns that are not there are zeros. Shares of x without a row are not loaded
//   barriers                stages: full by bytes, empty by a lane of each warp that multiplied, of all sharers.
//                           `joined`: the bytes of the other slices. Of the cluster: when barriers are there, once no
//                           products read a stage, and once all that was sent has come
//   shared memory           kStages stages of x and W, barriers, bias. After the last stage, in the stages' memory, the
//                           sums of both warpgroups, those that are sent and those that come
//
// The weight does not change while a token is decoded, so a block asks for the W of all its first stages before the
// kernel before it is over, and for x after that. Two blocks share an SM: one's loads come while the other waits.
//
// Two products of ranks, which have few blocks and are over before they have begun, are one launch.
//
// With SwiGLU (kSwiglu) half of a block's rows are of W's upper half and the others those that belong to them.
#include <algorithm>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/sm80/fragments.cuh"
#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/multicast.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "gpu/tensor_map.h"
#include "ops/cuda/gemm_m32.h"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/gemm_m8.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "ops/cuda/sm90/gemm_rows.cuh"

namespace fw::cuda {
namespace {

constexpr int kTokens = kGemmM64MaxM, kStageColumns = 64;
constexpr int kProductWorkers = 256, kProductThreads = kProductWorkers + 32;
constexpr int kJoinBarrier = 1;
constexpr int kMostSlicedRows = 64;

// A cluster has eight blocks at most. With 128 rows two blocks wait for each other less than four.
constexpr int sharers_of(int rows, int slices) { return slices == 4 || rows == 128 ? 2 : 4; }

template <int kRows_, int kSlices_>
struct GemmM64Shape {
  static constexpr int kRows = kRows_, kSlices = kSlices_;
  static constexpr int kSharers = sharers_of(kRows, kSlices), kCluster = kSharers * kSlices;
  static constexpr int kXRows = kTokens / kSharers;  // of a sharer
  static constexpr int kWeight = kTokens * 128, kStageBytes = kWeight + kRows * 128;
  // of each of two blocks; a KB of each is the system's
  static constexpr int kBlockShared = (228 / 2 - 1) * 1024, kBarrierBytes = 256, kBiasBytes = 4 * 128;
  // An even number: a slot is always the same warpgroup's. The other one could be a round ahead of a slot whose load is
  // late, and take the round before for it.
  static constexpr int kStages = (kBlockShared - kBarrierBytes - kBiasBytes) / kStageBytes / 2 * 2;
  static constexpr int kBarriers = kStages * kStageBytes, kBias = kBarriers + kBarrierBytes;
  static constexpr int kShared = kBias + kBiasBytes;
  struct Barriers : RingBarriers<kStages> {
    uint64_t joined;
  };
  // Sums of a warpgroup [64, kSumStride], the second's behind the first's. Then shares [64, kShare], those that are
  // sent and those that come. Lanes that write or read the sums of a row in eights meet all banks.
  static constexpr int kSumStride = kRows + 8, kShare = kRows / kSlices;
  static constexpr int kGroupSums = kTokens * kSumStride, kShareSums = kTokens * kShare;
  static constexpr int kSent = 2 * kGroupSums, kReceived = kSent + (kSlices - 1) * kShareSums;
  static_assert(kRows % 16 == 0 && kRows <= 128 && kShare % 4 == 0 && kStageBytes % 1024 == 0);
  static_assert(sizeof(Barriers) <= kBarrierBytes);
  static_assert(4 * (kReceived + (kSlices - 1) * kShareSums) <= kBarriers);
  // Which of the others' shares, in order, that of `slice` is.
  static FW_DEVICE int among_others(int slice, int own) { return slice < own ? slice : slice - 1; }
};

// sums [64, kRows] += a SW128 tile of x times the transpose of that of W.
template <int kRows>
FW_DEVICE void add_stage(float (&sums)[kRows / 2], uint32_t x, uint32_t weight) {
  const uint64_t a = wgmma_descriptor(x, 16, 1024), b = wgmma_descriptor(weight, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kStageColumns / 16; ++k)
    wgmma_ss<kRows, false, false>(sums, descriptor_after(a, 32 * k), descriptor_after(b, 32 * k), true);
}

FW_DEVICE float4 sum_of(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Four neighbouring sums of a token, both warpgroups'.
template <class Shape>
FW_DEVICE float4 block_sums(const float* sums, int token, int row) {
  const float* const at = sums + token * Shape::kSumStride + row;
  return sum_of(*reinterpret_cast<const float4*>(at), *reinterpret_cast<const float4*>(at + Shape::kGroupSums));
}

template <int kRows, int kSlices, bool kSwiglu>
FW_DEVICE void gemm_m64_tile(const GemmRowsArgs& a, const GemmRowsMaps& maps) {
  using Shape = GemmM64Shape<kRows, kSlices>;
  constexpr int kStages = Shape::kStages, kSharers = Shape::kSharers, kShare = Shape::kShare;
  constexpr int kOutputs = kSwiglu ? kRows / 2 : kRows;
  static_assert(!kSwiglu || kSlices == 1);
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  const int block = static_cast<int>(block_index_x()), rank = block % Shape::kCluster, slice = rank / kSharers,
            sharer = rank % kSharers, row = (block / Shape::kCluster * kSharers + sharer) * kOutputs;
  const int first = a.stages * slice / kSlices, count = a.stages * (slice + 1) / kSlices - first;

  if (warp_index() == kProductWorkers / 32) {
    const int ahead = min(count, kStages), x_shares = (a.rows + Shape::kXRows - 1) / Shape::kXRows;
    const auto issue_weight = [&](int i, int slot) {
      char* const to = shared + slot * Shape::kStageBytes + Shape::kWeight;
      const int column = (first + i) * kStageColumns;
      mbarrier_expect(barriers.full + slot, static_cast<uint32_t>(kRows * 128 + x_shares * Shape::kXRows * 128));
      tensor_load(to, maps.weight, column, 0, row, 0, barriers.full + slot);
      if constexpr (kSwiglu)
        tensor_load(to + kOutputs * 128, maps.weight, column, 0, row + a.out, 0, barriers.full + slot);
    };
    const auto issue_x = [&](int i, int slot) {
      if (sharer >= x_shares) return;
      tensor_load_multicast(shared + slot * Shape::kStageBytes + sharer * Shape::kXRows * 128, maps.x,
                            (first + i) * kStageColumns, 0, sharer * Shape::kXRows, 0, barriers.full + slot,
                            ((1u << kSharers) - 1) << slice * kSharers);
    };
    if (lane_index() == 0) {
      prefetch_map(maps.x);
      barriers.init(1, kSharers * kProductWorkers / 2 / 32);
      mbarrier_init(&barriers.joined, 1);
      mbarrier_init_fence();
      if constexpr (kSlices > 1)
        mbarrier_expect(&barriers.joined, static_cast<uint32_t>((kSlices - 1) * 4 * kShare * a.rows));
      FW_NO_UNROLL
      for (int i = 0; i < ahead; ++i) issue_weight(i, i);
    }
    sync_warp();
    cluster_arrive(), cluster_wait();  // the barriers are there, in all blocks
    if (lane_index() == 0) {
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
    sync_warp();  // barriers are for whole warps
    if constexpr (kSlices > 1) cluster_arrive(), cluster_wait();
    cluster_arrive(), cluster_wait();
    return;
  }

  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index());
  float* const bias = reinterpret_cast<float*>(shared + Shape::kBias);
  if (thread < kOutputs) bias[thread] = a.bias != nullptr && row + thread < a.out ? a.bias[row + thread] : 0.0f;
  cluster_arrive(), cluster_wait();
  grid_dependency_wait();
  grid_dependency_launch();
  // What the block stores: its share of the tile's outputs, of every token, four at a time.
  constexpr int kFours = (kSwiglu ? kOutputs : kShare) / 4,
                kTurns = (kTokens * kFours + kProductWorkers - 1) / kProductWorkers;
  const auto token_of = [&](int turn) { return (turn * kProductWorkers + thread) / kFours; };
  const auto output_of = [&](int turn) { return slice * kShare + (turn * kProductWorkers + thread) % kFours * 4; };
  Packet<Bf16, 4> before[kTurns];
  if (a.addend != nullptr) {
    FW_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int m = token_of(turn), at = row + output_of(turn);
      if (m < a.rows && at < a.out)
        before[turn] = load_four(a.addend + m * a.addend_stride + at, a.out - at, a.addend_whole != 0);
    }
  }

  const int group = shuffle(thread / 128, 0);
  const uint32_t base = shuffle(shared_address(shared), 0);
  float sums[kRows / 2];
  FW_UNROLL
  for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
  Ring<kStages> ring, previous;
  if (group == 1) ring.next();
  // The warp has read its stage, says a lane to each sharer: all send to this block's next one. Only where there is
  // one: an arrival that nobody waits for may come when the block is over and its memory another's.
  const auto put_empty = [&](const Ring<kStages>& of) {
    sync_warp();
    if (lane < kSharers) mbarrier_arrive_at(barriers.empty + of.slot, slice * kSharers + lane);
  };
  FW_NO_UNROLL
  for (int i = group; i < count; i += 2) {
    barriers.wait_full(ring);
    const uint32_t stage = base + static_cast<uint32_t>(ring.slot * Shape::kStageBytes);
    wgmma_fence();
    add_stage<kRows>(sums, stage, stage + Shape::kWeight);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > group && i - 2 + kStages < count) put_empty(previous);
    previous = ring;
    ring.next();
    ring.next();
  }
  wgmma_wait<0>();
  keep(sums);

  float* const parts = reinterpret_cast<float*>(shared);
  if constexpr (kSlices > 1) cluster_arrive();
  named_barrier_sync(kJoinBarrier, kProductWorkers);  // no product reads a stage any more
  {
    float* const mine =
        parts + group * Shape::kGroupSums + (thread % 128 / 32 * 16 + lane / 4) * Shape::kSumStride + 2 * (lane % 4);
    FW_UNROLL
    for (int i = 0; i < kRows / 2; i += 2) {
      *reinterpret_cast<float2*>(mine + i % 4 / 2 * 8 * Shape::kSumStride + i / 4 * 8) = {sums[i], sums[i + 1]};
    }
  }
  named_barrier_sync(kJoinBarrier, kProductWorkers);
  if constexpr (kSlices > 1) {
    constexpr int kOfShare = kShare / 4;
    for (int i = thread; i < (kSlices - 1) * a.rows * kOfShare; i += kProductWorkers) {
      const int other = i / (a.rows * kOfShare), four = i % (a.rows * kOfShare), m = four / kOfShare,
                to = other < slice ? other : other + 1;
      *reinterpret_cast<float4*>(parts + Shape::kSent + other * Shape::kShareSums + 4 * four) =
          block_sums<Shape>(parts, m, to * kShare + four % kOfShare * 4);
    }
    fence_async_shared();
    named_barrier_sync(kJoinBarrier, kProductWorkers);
    cluster_wait();  // nor does one of the other blocks
    if (thread < kSlices && thread != slice) {
      cluster_copy(parts + Shape::kReceived + Shape::among_others(slice, thread) * Shape::kShareSums,
                   thread * kSharers + sharer,
                   parts + Shape::kSent + Shape::among_others(thread, slice) * Shape::kShareSums,
                   static_cast<uint32_t>(4 * kShare * a.rows), &barriers.joined);
    }
    mbarrier_wait(&barriers.joined, 0);
  }
  FW_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) {
    const int m = token_of(turn), output = output_of(turn), left = a.out - row - output;
    if (m >= a.rows || left <= 0) continue;
    float4 sum = block_sums<Shape>(parts, m, output);
    if constexpr (kSlices > 1) {
      const float* const received = parts + Shape::kReceived + m * kShare + (output - slice * kShare);
      const float4 own = sum;
      FW_UNROLL
      for (int s = 0; s < kSlices; ++s) {
        const float4 x =
            s == slice ? own
                       : *reinterpret_cast<const float4*>(received + Shape::among_others(s, slice) * Shape::kShareSums);
        sum = s == 0 ? x : sum_of(sum, x);
      }
    }
    float y[4] = {sum.x, sum.y, sum.z, sum.w};
    if constexpr (kSwiglu) {
      const float4 factor = block_sums<Shape>(parts, m, kOutputs + output);
      const float factors[4] = {factor.x, factor.y, factor.z, factor.w};
      FW_UNROLL for (int i = 0; i < 4; ++i) y[i] = y[i] * sigmoid(y[i]) * factors[i];
    } else {
      float more[4];
      before[turn].get(more);
      FW_UNROLL for (int i = 0; i < 4; ++i) y[i] += bias[output + i] + more[i];
    }
    store_four(a.y + m * a.y_stride + row + output, left, a.y_whole != 0, y);
  }
  cluster_arrive(),
      cluster_wait();  // all that this block was to send has come, and none arrives at a barrier that is gone
}

template <int kRows, int kSlices, bool kSwiglu>
__global__ void __launch_bounds__(kProductThreads, 2)
    gemm_m64_kernel(const GemmRowsArgs a, const __grid_constant__ GemmRowsMaps maps) {
  gemm_m64_tile<kRows, kSlices, kSwiglu>(a, maps);
}
// Two products, one in y 0 and one in y 1.
struct GemmM64Pair {
  GemmRowsArgs of[2];
  GemmRowsMaps maps[2];
};
template <int kRows>
__global__ void __launch_bounds__(kProductThreads, 2) gemm_m64_pair_kernel(const __grid_constant__ GemmM64Pair pair) {
  constexpr int kSharers = GemmM64Shape<kRows, 1>::kSharers;
  const GemmRowsArgs& a = pair.of[block_index_y()];
  if (static_cast<int>(block_index_x()) / kSharers * kSharers * kRows < a.out)  // a cluster as a whole
    gemm_m64_tile<kRows, 1, false>(a, pair.maps[block_index_y()]);
}

template <int kRows, int kSlices>
unsigned blocks_for(int out, int parts) {
  using Shape = GemmM64Shape<kRows, kSlices>;
  return static_cast<unsigned>(parts_of(parts_of(out, kRows / parts), Shape::kSharers) * Shape::kCluster);
}

// Calls f.operator()<kRows>() for the rows of W of a block.
template <class F>
void with_rows(int rows, F&& f) {
  switch (rows) {
    case 32:
      return f.template operator()<32>();
    case 48:
      return f.template operator()<48>();
    case 64:
      return f.template operator()<64>();
    case 80:
      return f.template operator()<80>();
    case 96:
      return f.template operator()<96>();
    case 128:
      return f.template operator()<128>();
    default:
      fail_internal("gemm_m64: expected 32, 48, 64, 80, 96 or 128 rows a block, got {}", rows);
  }
}

template <int kSlices, bool kSwiglu>
void launch_rows(int rows, const GemmRowsArgs& a, const GemmRowsMaps& maps, void* stream) {
  with_rows(rows, [&]<int kRows>() {
    if constexpr (kSlices == 1 || kRows <= kMostSlicedRows) {
      using Shape = GemmM64Shape<kRows, kSlices>;
      launch_overlapped_clusters(gemm_m64_kernel<kRows, kSlices, kSwiglu>,
                                 Dim3{blocks_for<kRows, kSlices>(a.out, kSwiglu ? 2 : 1)}, Shape::kCluster,
                                 kProductThreads, Shape::kShared, stream, a, maps);
    } else {
      fail_internal("gemm_m64: expected at most {} rows a block in {} slices, got {}", kMostSlicedRows, kSlices, kRows);
    }
  });
}

// In a all that follows from x, the weight and y.
GemmRowsMaps make_maps(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, GemmM64Tiles tiles, int parts,
                       GemmRowsArgs& a) {
  if (!takes_gemm_m64(x, weight))
    fail_internal("gemm_m64: expected what takes_gemm_m64 takes, got {} rows of {} for {}", x.rows, x.cols,
                  weight.rows);
  set_rows(a, x, y, kStageColumns);
  GemmRowsMaps maps;
  if (!map_of(weight, tiles.rows / parts, maps.weight) ||
      !map_of(x, kTokens / sharers_of(tiles.rows, tiles.slices), maps.x))
    fail_internal("gemm_m64: no tensor map of [{}, {}]", weight.rows, x.cols);
  return maps;
}

}  // namespace

bool takes_gemm_m64(Mat<const Bf16> x, Mat<const Bf16> weight) {
  constexpr int64_t kMost = INT32_MAX - 1024;
  return x.rows > 0 && x.rows <= kGemmM64MaxM && x.cols > 0 && x.cols % 8 == 0 && in_sixteens(x) &&
         in_sixteens(weight) && weight.rows > 0 && weight.rows <= kMost && x.cols <= kMost &&
         current_arch() == Arch::kSm90;
}

// Two blocks for each of the 132 SMs of an H100 or H200. Few rows of W a block are few bytes beside
// the 64 rows of x: then the columns are in slices of eight stages or more, in 172 blocks.
GemmM64Tiles gemm_m64_tiles(int64_t out, int64_t in, bool swiglu) {
  constexpr int64_t kBlocks = 264, kSlicedBlocks = 172, kLeastStages = 8, kLeastRows = 32;
  const auto rows_for = [&](int64_t tiles) {
    const int64_t rows = std::max(parts_of(parts_of(out, tiles), 16) * 16, kLeastRows);
    return static_cast<int>(rows > 96 ? 128 : rows);
  };
  if (swiglu || parts_of(out, kBlocks) > 16) return {rows_for(kBlocks), 1};
  int slices = 1;
  while (slices < 4 && parts_of(in, kStageColumns) >= 2 * slices * kLeastStages) slices *= 2;
  return slices == 1 ? GemmM64Tiles{rows_for(kBlocks), 1}
                     : GemmM64Tiles{std::min(rows_for(kSlicedBlocks / slices), kMostSlicedRows), slices};
}

void gemm_m64_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     GemmM64Tiles tiles, void* stream) {
  GemmRowsArgs a = linear_args(weight.rows, bias, addend);
  const GemmRowsMaps maps = make_maps(x, weight, y, tiles, 1, a);
  switch (tiles.slices) {
    case 1:
      return launch_rows<1, false>(tiles.rows, a, maps, stream);
    case 2:
      return launch_rows<2, false>(tiles.rows, a, maps, stream);
    case 4:
      return launch_rows<4, false>(tiles.rows, a, maps, stream);
    default:
      fail_internal("gemm_m64: expected 1, 2 or 4 slices, got {}", tiles.slices);
  }
}
void gemm_m64_linear(Mat<const Bf16> x, Mat<const Bf16> weight, const float* bias, Mat<const Bf16> addend, Mat<Bf16> y,
                     void* stream) {
  if (x.rows <= kGemmM32MaxM) return gemm_m32_linear(x, weight, bias, addend, y, stream);
  gemm_m64_linear(x, weight, bias, addend, y, gemm_m64_tiles(weight.rows, x.cols), stream);
}

bool gemm_m64_pair(const LinearPart<Bf16>& first, const LinearPart<Bf16>& second, void* stream) {
  if (first.x.rows <= kGemmM32MaxM) return gemm_m32_pair(first, second, stream);
  GemmM64Pair pair;
  GemmM64Tiles tiles;
  for (int i = 0; i < 2; ++i) {
    const LinearPart<Bf16>& of = i == 0 ? first : second;
    const Mat<const Bf16> weight = operand<Bf16>(of.weight);
    const GemmM64Tiles own = gemm_m64_tiles(weight.rows, of.x.cols);
    if (!takes_gemm_m64(of.x, weight) || own.slices > 1) return false;
    tiles.rows = std::max(tiles.rows, own.rows);  // with one slice they are no part of the bits
  }
  for (int i = 0; i < 2; ++i) {
    const LinearPart<Bf16>& of = i == 0 ? first : second;
    const Mat<const Bf16> weight = operand<Bf16>(of.weight);
    pair.of[i].bias = of.bias;
    pair.of[i].out = static_cast<int>(weight.rows);
    pair.maps[i] = make_maps(of.x, weight, of.y, tiles, 1, pair.of[i]);
  }
  with_rows(tiles.rows, [&]<int kRows>() {
    using Shape = GemmM64Shape<kRows, 1>;
    const Dim3 grid{blocks_for<kRows, 1>(std::max(pair.of[0].out, pair.of[1].out), 1), 2};
    launch_overlapped_clusters(gemm_m64_pair_kernel<kRows>, grid, Shape::kCluster, kProductThreads, Shape::kShared,
                               stream, pair);
  });
  return true;
}

void gemm_m64_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, GemmM64Tiles tiles, void* stream) {
  GemmRowsArgs a;
  a.out = static_cast<int>(y.cols);
  const GemmRowsMaps maps = make_maps(x, weight, y, tiles, 2, a);
  launch_rows<1, true>(tiles.rows, a, maps, stream);
}
void gemm_m64_swiglu(Mat<const Bf16> x, Mat<const Bf16> weight, Mat<Bf16> y, void* stream) {
  if (x.rows <= kGemmM32MaxM) return gemm_m32_swiglu(x, weight, y, stream);
  gemm_m64_swiglu(x, weight, y, gemm_m64_tiles(weight.rows, x.cols, true), stream);
}

// For more rows than gemm_m8 takes and at most kGemmM64MaxM.
template <>
bool ops::swiglu_linear_forward(const Exec<Bf16>& exec, Mat<const Bf16> x, Weight<float> weight, Mat<Bf16> y) {
  const Mat<const Bf16> w = operand<Bf16>(weight);
  if (x.rows <= kGemmM8MaxM || !takes_gemm_m64(x, w)) return false;
  gemm_m64_swiglu(x, w, y, exec.device.stream());
  return true;
}

}  // namespace fw::cuda
