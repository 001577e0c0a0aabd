// The gradient kernel for scalar decay, and none, of any rule and any memory (most take gradients/scalar/kernel.cuh): from what the scans left (tiles.h) and
// the raw inputs of a chunk and value head, the gradients of the raw inputs (recurrence.md 5). All value blocks go through the stages first; the products over
// values stay in registers. Then dP and dT, with the decay, meet the streams, and the front's gradients are made where the products lie.
#pragma once

#include <algorithm>

#include "scan/cuda/call/launch.h"
#include "scan/cuda/gradients/general/rows.cuh"

namespace fw::cuda {

// Value blocks in the order in which the stages take them.
struct ValueStep {
  int turn = 0, block = 0;
  FW_DEVICE void next(int blocks) {
    if (++block < blocks) return;
    block = 0;
    ++turn;
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) scalar_gradient_kernel(const __grid_constant__ ScalarGradientArgs args) {
  ScalarChunk<Shape> c(args);
  begin_turns(c);
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(c.barrier(i), Shape::kThreads + 4);
    mbarrier_init(c.pairs_barrier(), 1);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) mbarrier_init(c.key_barrier(i), Shape::kThreads);
    mbarrier_init_fence();
  }
  for (int i = 0; i < 3; ++i) {
    if (c.warp == i) c.find(i);
  }
  sync_threads();
  prefetch_turn(c, 1);
  if (c.thread == 0) load_pairs(c, 0);
  ValueStep loaded;
  for (int i = 0; i < Shape::kStages; ++i) {
    load_stage(c, i, loaded.turn, loaded.block);
    loaded.next(c.blocks);
  }
  float2 numbers = load_row_numbers(c, 0);
  publish_row_numbers(c, 0, numbers);
  numbers = load_row_numbers(c, 1);
  int step = 0;  // value blocks so far

  int turn = 0;
  FW_NO_UNROLL
  for (; c.has(turn); ++turn) {
    sync_threads();  // the rows and coefficients of the turn before have been read
    load_keys(c, turn);
    mbarrier_wait(c.key_barrier(turn), turn / 2 & 1);
    GeneralRows::make_streams(c, turn);
    mbarrier_wait(c.pairs_barrier(), turn & 1);
    fence_async_shared();
    sync_threads();
    c.refresh();
    if (turn > 0 && c.warp == 3) store_decay_gradient(c, turn - 1);

    StreamSums sums;
    float tail = 0;
    {
      PairSums<Shape> pairs;
      ValueSums z_sums[ValueLanes<Shape>::kPasses] = {};
      const StillState<Shape> still(c, turn);
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block, ++step) {
        const int index = step % Shape::kStages, stage = index * Shape::kStageBytes;
        ValueWords<Shape> words;
        mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
        make_value_tiles(c, stage);
        c.refresh();
        start_value_products(c, stage, sums, pairs);
        words.load(c, turn, block);
        value_rows(c, turn, block, stage, words, z_sums);
        if (!still.by_scans()) tail = dot_states(c, stage, tail);
        const StillWords<Shape> words_of_still(c, still, block);
        finish_value_products(sums, pairs);
        if (still.by_scans()) tail = words_of_still.dot(c, still, stage, tail);
        if (block + 1 == c.blocks) break;
        fence_async_shared();
        sync_threads();
        load_stage(c, index, loaded.turn, loaded.block);
        loaded.next(c.blocks);
      }
      store_decayed_pairs(c, turn, pairs);
      FW_UNROLL
      for (int i = 0; i < ValueLanes<Shape>::kPasses; ++i) {
        const float sum = group_sum<ValueLanes<Shape>::kLanes>(z_sums[i].gain);
        const int row = c.thread / ValueLanes<Shape>::kLanes + i * ValueLanes<Shape>::kRows;
        if (c.thread % ValueLanes<Shape>::kLanes == 0) c.floats(Shape::kDZv)[row] = sum;
        if constexpr (Shape::kStills) {
          const float v_dz = group_sum<ValueLanes<Shape>::kLanes>(z_sums[i].v_dz);
          if (c.thread % ValueLanes<Shape>::kLanes == 0) c.floats(Shape::kVDz)[row] = v_dz;
        }
      }
    }
    fence_async_shared();
    sync_threads();
    load_stage(c, step % Shape::kStages, loaded.turn, loaded.block);
    loaded.next(c.blocks);
    ++step;

    c.refresh();
    publish_row_numbers(c, turn + 1, numbers);
    numbers = load_row_numbers(c, turn + 2);
    if (c.warp == 5) c.find(turn + 3);
    prefetch_turn(c, turn + 2);

    const StillState<Shape> still(c, turn);
    const float of_rows = finish_streams(c, turn, sums, still.by_rows());
    if (!still.by_scans()) tail = tail * exp2_fast(c.turn_floats(Shape::kG, turn)[63]) + of_rows;
    tail = warp_sum(tail);
    if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = tail;
    GeneralRows::sum_rows(c, turn, sums);
    fence_async_shared();
    sync_threads();
    c.refresh();
    if (c.thread == 6 * 32) load_pairs(c, turn + 1);
    if (c.thread < kChunk) GeneralRows::row_numbers(c, turn, c.thread);
    sync_threads();
    GeneralRows::store_gradients(c, turn, sums);
  }
  sync_threads();
  if (turn > 0 && c.warp == 3) store_decay_gradient(c, turn - 1);
  end_turns(c);
}

#ifdef FW_CUDA_EMULATION
inline constexpr int64_t kProcessors = 2;  // so that small problems have several turns
#else
inline constexpr int64_t kProcessors = 132;
#endif

// Rows of 16-byte pieces, wherever a sequence or head begins.
inline bool whole_pieces(const TokenArg& x, int dim) {
  return x.data != nullptr && x.bf16 != 0 && ((x.stride_b | x.stride_t | x.stride_h | dim) & 7) == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0;
}
inline unsigned pieces_of(const GradientArgs& args) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  return (whole_pieces(x.in.v, x.V) ? kPiecesV : 0u) | (whole_pieces(args.d_o, x.V) ? kPiecesDOut : 0u) | (whole_pieces(d.v, x.V) ? kPiecesDV : 0u) |
         (whole_pieces(d.q, x.K) ? kPiecesDQ : 0u) | (whole_pieces(d.k, x.K) ? kPiecesDK : 0u) | (plain_streams(x.rule) ? kPlainRule : 0u) |
         (mixed_streams(x.rule) ? kMixedRule : 0u) | (gain_by_residual(x.rule) ? kGainByResidual : 0u);
}

// How much longer it takes beside a scan.
inline constexpr double kBesideScan = 1.05;
// Shape::kTileTime: microseconds that a block takes for a tile with two value blocks (measured on an H200).
// With TilesReady there are two launches. The first has the processors that the scan leaves free, and so many tiles as they can do in the scan's time, or a
// turn more; the second has the rest, and begins where there is room.
template <class Shape>
void launch_gradients(void (*kernel)(ScalarGradientArgs), unsigned threads, size_t shared_bytes, void* stream, ScalarGradientArgs args) {
  const auto blocks_for = [](int64_t tiles, int64_t processors) { return static_cast<unsigned>(std::min(tiles, processors * Shape::kBlocksPerSm)); };
  const int64_t tiles = args.tiles;
  TilesReady& ready = args.gradients.ready;
  if (!Shape::kFollows) ready = {};
  if (ready.made == nullptr) {
    launch(kernel, Dim3{blocks_for(tiles, kProcessors)}, threads, shared_bytes, stream, args);
    return;
  }
  const int64_t free = std::max<int64_t>(1, kProcessors - ready.scan_blocks), value_blocks = (args.gradients.problem.V + kValueBlock - 1) / kValueBlock;
  const double tile_time = Shape::kTileTime * static_cast<double>(1 + value_blocks) / 3;
  const int64_t turns = 1 + static_cast<int64_t>(ready.scan_time / (kBesideScan * tile_time));
  args.last = static_cast<unsigned>(tiles - 1);
  args.tiles = std::min(tiles, turns * free * Shape::kBlocksPerSm);
  const int64_t rest = tiles - args.tiles;
  args.more = rest > 0;
  launch_overlapped(kernel, Dim3{blocks_for(args.tiles, free)}, threads, shared_bytes, stream, args);
  if (rest == 0) return;
  args.last -= static_cast<unsigned>(args.tiles);
  args.tiles = rest;
  args.more = false;
  launch_overlapped(kernel, Dim3{blocks_for(rest, kProcessors)}, threads, shared_bytes, stream, args);
}

template <class Shape>
void launch_scalar_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  launch_gradients<Shape>(scalar_gradient_kernel<Shape>, Shape::kThreads, Shape::kBytes, stream, {args, chunks * args.problem.HV, 0, false, pieces_of(args)});
}

}  // namespace fw::cuda
