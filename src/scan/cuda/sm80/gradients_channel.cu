// gradients() of kernels.h by mma.sync where every key channel has a decay of its own, of any memory and any rule. The
// phases are those of sm90/gradients/channel/kernel.cuh, in 99 KB of shared memory. So the streams and the factors of
// their anchors are made after the last value block, where its stage was.
//
// 4 kTileK threads, which do everything together; a block takes every grid-th chunk and value head. Per work tile:
//   the front's coefficients of q and k    a stage a value block: dv, dP, dT, and what the states give dr, de, dw
//   decays and the streams                 dr, de, dw
//   q and k again                          the gradients of the front and of the log-decays
#include <algorithm>

#include "scan/cuda/dispatch.h"
#include "scan/cuda/gradients/channel/mixed.cuh"
#include "scan/cuda/gradients/launch.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm80/gradient_loads.cuh"

namespace fw::cuda {

template <WarpGradientTraits kTraits>
struct WarpChannelShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kMmaSync = true, kChannel = true, kDelta = kTraits.is_delta, kStreams = false, kGates = true,
                        kUnscaled = false, kNoDecayFix = false, kWhole = false;
  static constexpr bool kPrecond = false, kMakesM = false, kFused = false, kOwnKey = false, kThirdRow = false,
                        kHalf = false, kSumsHeads = false, kFollows = false;
  static constexpr bool kJoinsDecays = false, kSumsInFactors = true;
  static constexpr Residuals kResiduals = Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32, kPairs = kTileK / 2;
  static constexpr int kBlocksPerSm = 1;
  static constexpr double kTileTime = 0;  // kFollows

  // A and P, later dT and dP.
  static constexpr int kA = 0, kP = kA + kSw128Bytes, kPairsEnd = kP + kSw128Bytes;
  // dR, and the stage: what one block of 64 value columns loads.
  static constexpr int kStateBytes = 64 * kTileK * 2, kKeyBytes = 0;
  static constexpr int kDR = kPairsEnd, kW = kDR + kSw128Bytes, kV = kW + kSw128Bytes, kOut = kV + kSw128Bytes,
                       kState = kOut + kSw128Bytes, kDState = kState + kStateBytes, kStageEnd = kDState + kStateBytes;
  static constexpr int64_t kStateStep = 64 * kTileK;  // numbers from one state in memory to the next
  // After the last block in their place -e, r and w, anchored, and the factors from the anchors to the rows.
  static constexpr int kErase = kPairsEnd, kRead = kErase + kStateBytes, kWrite = kRead + kStateBytes,
                       kFactors = kWrite + kStateBytes, kStreamsEnd = kFactors + kStateBytes;
  // Before the streams what bounds took of decays [8, kTileK]; after the products of streams dG in float32
  // [64, kTileK].
  static constexpr int kBoundSums = kErase, kDecaySums = kA;
  static_assert(8 * kTileK * 4 <= kStateBytes && 64 * kTileK * 4 <= kRead - kDecaySums);

  // Arrays of 64 floats, as ChannelShape has them.
  static constexpr int kBeta = std::max(kStageEnd, kStreamsEnd), kDiagonal = kBeta + 512, kZv = kDiagonal + 256,
                       kDZv = kZv + 256;
  static constexpr int kCoefs = kDZv + 256, kScalars = kCoefs + static_cast<int>(sizeof(FrontCoefs<float>)) / 4 * 256;
  static constexpr int kSlopes = kScalars + static_cast<int>(sizeof(FrontScalars<float>)) / 4 * 256;
  static constexpr int kWarpSums = kSlopes + 4 * 256, kBarriers = kWarpSums + 64, kCoords = kBarriers;
  // Decay over 8 rows [8, kTileK], in its place later sums over 8 rows of dG; sums of D (.) S0 [8, kTileK], tails of dg
  // [4, kTileK].
  static constexpr int kHalfDecays = kCoords + kCoordBytes, kGroupSums = kHalfDecays,
                       kStateDots = kHalfDecays + 8 * kTileK * 4, kTails = kStateDots + 8 * kTileK * 4;
  static constexpr int kBytes = kTails + 4 * kTileK * 4;
  static_assert(kBytes <= kSm80SharedBytes);
};

namespace {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm80_gradients_channel_kernel(const __grid_constant__ GradientKernelArgs args) {
  constexpr int kStage = 0;  // the phases' offset of the stage, which is in kW, kV, ...
  ChannelChunk<Shape> c(args);
  FW_NO_UNROLL
  for (int work_tile = 0; c.has(work_tile); ++work_tile) {
    sync_threads();  // of the work tile before everything has been read
    if (c.warp == 0) c.find(work_tile);
    sync_threads();
    publish_beta(c, work_tile, load_beta(c, work_tile));
    load_intra_chunk(c, work_tile);
    sync_threads();
    MixedRows::make_streams<MixedRows::Part::kScalars>(c, work_tile, MixedRows::load_words(c, work_tile));

    StreamSums sums;
    {
      ChannelPairs<Shape> pairs;
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block) {
        sync_threads();  // the stage may be loaded
        load_value_block(c, work_tile, block);
        finish_loads();
        c.refresh();
        make_value_tiles(c, kStage);
        c.refresh();
        start_channel_products(c, kStage, sums, pairs, [] {});
        finish_channel_products(sums, pairs);
        c.refresh();
        FW_NO_UNROLL
        for (int pass = 0; pass < ChannelLanes<Shape>::kPasses; ++pass) {
          ChannelValueWords<Shape> words;
          words.load(c, work_tile, block, pass);
          channel_value_rows(c, work_tile, block, pass, kStage, words);
        }
        sum_state_dots(c, block, kStage);
      }
      store_block_pairs(c, pairs);
    }
    sync_threads();  // the stage has been read
    c.refresh();
    sum_channel_decay(c, work_tile, load_decay_words(c, work_tile));
    sync_threads();
    c.refresh();
    const bool bounded = decays_are(c, Decays::kBounded);
    if (bounded) {
      unbound_states(c, work_tile, sums);
      sync_threads();  // what bounds took has been read
    }
    c.refresh();
    MixedRows::make_streams<MixedRows::Part::kStreams>(c, work_tile, MixedRows::load_words(c, work_tile));
    sync_threads();
    c.refresh();
    walk_blocks(c, sums);
    c.refresh();
    MixedRows::finish_streams(c, work_tile, sums);
    sync_threads();
    c.refresh();
    if (c.thread < kChunk) MixedRows::row_scales(c, work_tile, c.thread);
    c.refresh();
    float2 d_g[8];
    sum_decay_gradient(c, d_g);
    sync_threads();
    store_channel_decay_gradient(c, work_tile, bounded, d_g);
    MixedRows::store_gradients(c, work_tile, sums);
  }
}

template <class Shape>
void launch_sm80_channel(const GradientArgs& args, int64_t chunks, void* stream) {
  const unsigned pieces = pieces_of(args) | channel_pieces_of(args, args.grads.d.erase_gate);
  launch_gradients<Shape>(sm80_gradients_channel_kernel<Shape>, Shape::kThreads, Shape::kBytes, stream,
                          {args, chunks * args.problem.HV, 0, false, pieces});
}

}  // namespace

void sm80_gradients_channel(const GradientArgs& args, GradientKernel, int k_tile, int64_t chunks, void* stream) {
  with_constants(
      [&](auto small, auto is_delta) {
        using Shape = WarpChannelShape<WarpGradientTraits{.k_tile = small ? 64 : 128, .is_delta = is_delta}>;
        launch_sm80_channel<Shape>(args, chunks, stream);
      },
      k_tile == 64, args.problem.rule.is_delta());
}

}  // namespace fw::cuda
