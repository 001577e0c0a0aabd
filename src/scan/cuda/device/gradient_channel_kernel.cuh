// The gradient kernel for channel decay. As that for scalar decay (gradient_scalar_kernel.cuh) up to dP and dT and from dr, de, dw on.
#pragma once

#include "scan/cuda/device/gradient_channel_rows.cuh"
#include "scan/cuda/device/gradient_scalar_kernel.cuh"

namespace fw::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) channel_gradient_kernel(const __grid_constant__ ScalarGradientArgs args) {
  ScalarChunk<Shape> c(args);
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(c.barrier(i), Shape::kThreads + 4);
    mbarrier_init(c.pairs_barrier(), 1);
    mbarrier_init_fence();
  }
  for (int i = 0; i < 3; ++i) {
    if (c.warp == i) c.find(i);
  }
  sync_threads();
  prefetch_turn(c, 1);
  prefetch_channels(c, 1);
  if (c.thread == 0) load_pairs(c, 0);
  RowWords rows = load_row_words(c, 0);
  DecayWords decays = load_decay_words(c, 0);
  ValueStep loaded;
  for (int i = 0; i < Shape::kStages; ++i) {
    load_stage(c, i, loaded.turn, loaded.block);
    loaded.next(c.blocks);
  }
  publish_row_numbers(c, 0, load_row_numbers(c, 0));
  float beta = load_row_numbers(c, 1).x;
  int step = 0;  // value blocks so far

  FW_NO_UNROLL
  for (int turn = 0; c.has(turn); ++turn) {
    c.refresh();
    sum_channel_decay(c, turn, decays);
    sync_threads();
    if constexpr (Shape::kFast) {
      make_fast_streams(c, turn, rows);
    } else {
      GeneralRows::make_streams(c, turn);
      anchor_streams(c);
    }
    join_decays(c);
    mbarrier_wait(c.pairs_barrier(), turn & 1);
    fence_async_shared();
    sync_threads();

    StreamSums sums;
    {
      PairSums<Shape> pairs;
      float z_sums[ValueLanes<Shape>::kPasses] = {};
      float2 state_dots = make_float2(0, 0);
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block, ++step) {
        c.refresh();
        const int index = step % Shape::kStages, stage = index * Shape::kStageBytes;
        // What lives beside the products in flight are few registers.
        if constexpr (Shape::kKey == 64 || Shape::kGates) {
          mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
          make_value_tiles(c, stage);
          start_value_products(c, stage, sums, pairs);
          finish_value_products(sums, pairs);
          const ValueWords<Shape> words(c, turn, block);
          add_state_dots(c, stage, state_dots);
          value_rows(c, turn, block, stage, words, z_sums);
        } else {
          const ValueWords<Shape> words(c, turn, block);
          mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
          make_value_tiles(c, stage);
          start_value_products(c, stage, sums, pairs);
          value_rows(c, turn, block, stage, words, z_sums);
          add_state_dots(c, stage, state_dots);
          finish_value_products(sums, pairs);
        }
        if (block + 1 == c.blocks) break;
        fence_async_shared();
        sync_threads();
        load_stage(c, index, loaded.turn, loaded.block);
        loaded.next(c.blocks);
      }
      store_block_pairs(c, pairs);
      store_float2(c.floats(Shape::kStateDots) + c.thread / Shape::kPairs * Shape::kKey + c.thread % Shape::kPairs * 2, state_dots.x, state_dots.y);
      FW_UNROLL
      for (int i = 0; i < ValueLanes<Shape>::kPasses; ++i) {
        const float sum = group_sum<ValueLanes<Shape>::kLanes>(z_sums[i]);
        if (c.thread % ValueLanes<Shape>::kLanes == 0) c.floats(Shape::kDZv)[c.thread / ValueLanes<Shape>::kLanes + i * ValueLanes<Shape>::kRows] = sum;
      }
    }
    fence_async_shared();
    sync_threads();
    load_stage(c, step % Shape::kStages, loaded.turn, loaded.block);
    loaded.next(c.blocks);
    ++step;

    c.refresh();
    const bool bounded = decays_are(c, Decays::kBounded);
    if (bounded) unbound_states(c, turn, sums);
    FastParts parts;
    if constexpr (Shape::kFast && Shape::kGates) load_gates(c, turn, parts);
    walk_blocks(c, sums);
    {
      float d_g[4][4];
      if constexpr (Shape::kFast) {
        finish_fast_streams(c, sums, d_g, parts);
      } else {
        finish_streams(c, sums, d_g);
      }
      sync_threads();
      store_decay_sums(c, d_g);
    }
    if constexpr (Shape::kFast) {
      store_row_sums(c, c.row(), parts.sums[0]);
      store_row_sums(c, c.row() + 8, parts.sums[1]);
    } else {
      restore_streams(c);
      GeneralRows::sum_rows(c, turn, sums, FragmentM<Shape>(c, turn));
    }
    sync_threads();
    float2 d_g[8];
    sum_decay_gradient(c, d_g);
    fence_async_shared();
    sync_threads();
    if (c.thread == 6 * 32) load_pairs(c, turn + 1);
    if (c.thread < kChunk) {
      if constexpr (Shape::kFast) {
        fast_row_numbers(c, turn, c.thread);
      } else {
        GeneralRows::row_numbers(c, turn, c.thread);
      }
    } else {  // meanwhile
      publish_row_numbers(c, turn + 1, make_float2(beta, 0));
      beta = load_row_numbers(c, turn + 2).x;
      if (c.warp == 5) c.find(turn + 3);
      prefetch_turn(c, turn + 2);
      prefetch_channels(c, turn + 2);
    }
    store_channel_decay_gradient(c, turn, bounded, d_g);
    sync_threads();
    if constexpr (Shape::kFast) {
      store_fast_gradients(c, turn, sums, parts);
    } else {
      GeneralRows::store_gradients(c, turn, sums, FragmentM<Shape>(c, turn));
    }
    c.refresh();
    rows = load_row_words(c, turn + 1);
    decays = load_decay_words(c, turn + 1);
  }
}

template <class Shape>
void launch_channel_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  const ScalarGradientArgs all{args, chunks * args.problem.HV, pieces_of(args)};
  const int64_t places = kProcessors * Shape::kBlocksPerSm;
  const unsigned grid = static_cast<unsigned>(all.tiles < places ? all.tiles : places);
  launch(channel_gradient_kernel<Shape>, Dim3{grid}, Shape::kThreads, Shape::kBytes, stream, all);
}

}  // namespace fw::cuda
