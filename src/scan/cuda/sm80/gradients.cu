// gradients() of kernels.h by mma.sync, for scalar and constant decay and none, of any memory and any rule. The phases
// are those of sm90/gradients/general/kernel.cuh, in 99 KB of shared memory. So the streams make room for the stage of
// a value block, and are made again after the last one. Where streams are raw rows times a scale, and rows are bf16 in
// pieces of 16 bytes, sm80/gradients_rows.cuh takes the call. With K above 128 a call has half of the channels
// (kernels.h: K256Half).
//
// 4 kTileK threads, which do everything together; a block takes every grid-th chunk and value head. Per work tile:
//   q and k, the front's coefficients      a stage a value block: dv, dP, dT, and what the states give dr, de, dw
//   the streams again                      dr, de, dw
//   q and k again                          the gradients of the front
#include "scan/cuda/dispatch.h"
#include "scan/cuda/gradients/launch.cuh"
#include "scan/cuda/gradients/rows.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/rule_traits.h"
#include "scan/cuda/sm80/gradient_loads.cuh"
#include "scan/cuda/sm80/gradients_rows.cuh"

namespace fw::cuda {

template <WarpGradientTraits kTraits>
struct WarpGradientShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kMmaSync = true, kChannel = false, kDelta = kTraits.is_delta, kStreams = false, kGates = true,
                        kUnscaled = kTraits.has_unscaled_keys, kWhole = false;
  static constexpr bool kHalf = kTraits.has_half_of_keys;
  static_assert(!kHalf || (kTileK == kHalfTileK && !kUnscaled));
  static constexpr bool kSumsHeads = false, kNoDecayFix = kUnscaled, kFollows = false;
  static constexpr Residuals kResiduals = kUnscaled ? Residuals::kAlways : Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32;
  static constexpr int kBlocksPerSm = 1;
  static constexpr double kTileTime = 0;  // kFollows

  // numbers from one state in memory to the next
  static constexpr int64_t kStateStep = 64 * (kHalf ? kMaxTileK : kTileK);
  // A and P, later dT and dP; dR.
  static constexpr int kA = 0, kP = kA + kSw128Bytes, kDR = kP + kSw128Bytes;
  // The stage: what one block of 64 value columns loads.
  static constexpr int kStateBytes = 64 * kTileK * 2, kKeyBytes = 2 * kStateBytes;
  static constexpr int kStage = kDR + kSw128Bytes;
  static constexpr int kW = kStage, kV = kW + kSw128Bytes, kOut = kV + kSw128Bytes, kState = kOut + kSw128Bytes,
                       kDState = kState + kStateBytes, kStageEnd = kDState + kStateBytes;
  // In its place r, w, e at the end of that memory: q becomes r and k w (make_streams()). Where A, P and dR were, q and
  // k again, once dP and dT are used.
  static constexpr int kErase = kStageEnd - kStateBytes, kWrite = kErase - kStateBytes, kRead = kWrite - kStateBytes;
  static constexpr int kFrontQ = kRead, kFrontK = kWrite, kRaw = 0;
  static_assert(kRead >= kDR && kRaw + 2 * kStateBytes <= kRead);

  // Arrays of 64 floats, as GeneralShape has them.
  static constexpr int kG = kStageEnd, kBeta = kG + 512, kDiagonal = kBeta + 512, kDG = kDiagonal + 256,
                       kZv = kDG + 256;
  static constexpr int kCoefs = kZv + 256, kScalars = kCoefs + static_cast<int>(sizeof(FrontCoefs<float>)) / 4 * 256;
  static constexpr int kSlopes = kScalars + static_cast<int>(sizeof(FrontScalars<float>)) / 4 * 256;
  static constexpr int kWarpSums = kSlopes + 4 * 256, kBarriers = kWarpSums + 64, kCoords = kBarriers;
  static constexpr int kSums = 7;
  static constexpr int kPartial = kCoords + kCoordBytes, kDZv = kPartial + kSums * kGroups * 256, kVDz = kDZv + 256;
  static constexpr int kBytes = kVDz + (kNoDecayFix ? 256 : 0);
  static_assert(kBytes <= kSm80SharedBytes);
};

namespace {

template <class Shape>
FW_DEVICE void load_keys_to(const WorkTile<Shape>& c, int work_tile, int to_q, int to_k) {
  const Problem& x = c.args.problem;
  const Rows q = c.rows_at(x.in.q, work_tile), k = c.rows_at(x.in.k, work_tile);
  const auto load = [&](const Rows& rows, int to) {
    if (wide_rows(rows) && x.K % 8 == 0) {
      copy_rows<Shape::kTileK>(c, rows, work_tile, 0, x.K, to);
    } else {
      load_row_tile<Shape::kTileK>(c, rows, false, work_tile, 0, x.K, to);
    }
  };
  load(q, to_q), load(k, to_k);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm80_gradients_kernel(const __grid_constant__ GradientKernelArgs args) {
  constexpr int kStage = 0;  // the phases' offset of the stage, which is in kW, kV, ...
  WorkTile<Shape> c(args);
  FW_NO_UNROLL
  for (int work_tile = 0; c.has(work_tile); ++work_tile) {
    sync_threads();  // of the work tile before everything has been read
    if (c.warp == 0) c.find(work_tile);
    sync_threads();
    publish_row_scales(c, work_tile, load_row_scales(c, work_tile));
    load_keys_to(c, work_tile, Shape::kFrontQ, Shape::kFrontK);
    load_intra_chunk(c, work_tile);
    finish_loads();
    GeneralRows::make_streams(c, work_tile);

    StreamSums sums;
    float tail = 0;
    {
      PairSums<Shape> pairs;
      ValueSums z_sums[ValueLanes<Shape>::kPasses] = {};
      const NoDecayState<Shape> still(c, work_tile);
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block) {
        sync_threads();  // the stage may be loaded
        load_value_block(c, work_tile, block);
        finish_loads();
        c.refresh();
        ValueWords<Shape> words;
        make_value_tiles(c, kStage);
        c.refresh();
        start_value_products(c, kStage, sums, pairs);
        words.load(c, work_tile, block);
        value_rows(c, work_tile, block, kStage, words, z_sums);
        if (!still.by_scans()) tail = dot_states(c, kStage, tail);
        const NoDecayWords<Shape> words_of_no_decay(c, still, block);
        finish_value_products(sums, pairs);
        if (still.by_scans()) tail = words_of_no_decay.dot(c, still, kStage, tail);
        c.refresh();
      }
      store_decayed_pairs(c, work_tile, pairs);
      FW_UNROLL
      for (int i = 0; i < ValueLanes<Shape>::kPasses; ++i) {
        const float sum = group_sum<ValueLanes<Shape>::kLanes>(z_sums[i].gain);
        const int row = c.thread / ValueLanes<Shape>::kLanes + i * ValueLanes<Shape>::kRows;
        if (c.thread % ValueLanes<Shape>::kLanes == 0) c.floats(Shape::kDZv)[row] = sum;
        if constexpr (Shape::kNoDecayFix) {
          const float v_dz = group_sum<ValueLanes<Shape>::kLanes>(z_sums[i].v_dz);
          if (c.thread % ValueLanes<Shape>::kLanes == 0) c.floats(Shape::kVDz)[row] = v_dz;
        }
      }
    }
    sync_threads();
    load_keys_to(c, work_tile, Shape::kFrontQ, Shape::kFrontK);
    finish_loads();
    GeneralRows::make_streams(c, work_tile);
    sync_threads();
    c.refresh();
    const NoDecayState<Shape> still(c, work_tile);
    const float of_rows = finish_streams(c, work_tile, sums, still.by_rows());
    if (!still.by_scans()) tail = tail * exp2_fast(c.work_tile_floats(Shape::kG, work_tile)[63]) + of_rows;
    tail = warp_sum(tail);
    if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = tail;
    sync_threads();  // dP and dT have been read
    load_keys_to(c, work_tile, Shape::kRaw, Shape::kRaw + Shape::kStateBytes);
    finish_loads();
    c.refresh();
    GeneralRows::sum_rows(c, work_tile, sums);
    sync_threads();
    c.refresh();
    if (c.thread < kChunk) GeneralRows::row_scales(c, work_tile, c.thread);
    sync_threads();
    GeneralRows::store_gradients(c, work_tile, sums);
    if (c.warp == 3) store_decay_gradient(c, work_tile);
  }
}

template <class Shape>
void launch_sm80(void (*kernel)(GradientKernelArgs), const GradientArgs& args, int64_t chunks, void* stream) {
  launch_gradients<Shape>(kernel, Shape::kThreads, Shape::kBytes, stream,
                          {args, chunks * args.problem.HV, 0, false, pieces_of(args)});
}
// Whether sm80/gradients_rows.cuh takes the call.
bool takes_rows(const GradientArgs& args) {
  const Problem& x = args.problem;
  constexpr unsigned kRead = kVec16Keys | kVec16V | kVec16DOut;
  const bool stores_values = args.grads.d.v.data != nullptr && (pieces_of(args) & kVec16DV) != 0;
  return plain_streams(x.rule) && !x.rule.uses_precond() && args.d_o.data != nullptr &&
         (stores_values || args.half.second) && (pieces_of(args) & kRead) == kRead;
}
template <WarpGradientTraits kTraits>
void launch_sm80(const GradientArgs& args, int64_t chunks, void* stream) {
  using Rows = RowGradientShape<kTraits>;
  using Streams = WarpGradientShape<kTraits>;
  takes_rows(args) ? launch_sm80<Rows>(sm80_row_gradients_kernel<Rows>, args, chunks, stream)
                   : launch_sm80<Streams>(sm80_gradients_kernel<Streams>, args, chunks, stream);
}

}  // namespace

void sm80_gradients(const GradientArgs& args, GradientKernel, int k_tile, int64_t chunks, void* stream) {
  with_constants(
      [&](auto small, auto is_delta, auto unscaled) {
        launch_sm80<WarpGradientTraits{
            .k_tile = small ? 64 : 128, .is_delta = is_delta, .has_unscaled_keys = is_delta && unscaled}>(args, chunks,
                                                                                                          stream);
      },
      k_tile == 64, args.problem.rule.is_delta(), unscaled_keys(args.problem.rule));
}

void sm80_k256_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  with_constants(
      [&](auto is_delta) {
        launch_sm80<WarpGradientTraits{.k_tile = kHalfTileK, .is_delta = is_delta, .has_half_of_keys = true}>(
            args, chunks, stream);
      },
      args.problem.rule.is_delta());
}

}  // namespace fw::cuda
