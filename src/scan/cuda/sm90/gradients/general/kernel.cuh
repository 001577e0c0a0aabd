// The gradient kernel for scalar decay, and none, of any rule and any memory (most take
// sm90/gradients/scalar/kernel.cuh). From what the scans left (tiles.h) and the raw inputs of a chunk and value head it
// makes the gradients of the raw inputs (recurrence.md 5). All value blocks go through the stages first; the products
// over values stay in registers. Then dP and dT, with the decay, meet the streams, and the front's gradients are made
// where the products lie.
//
// Roles, 4 kTileK threads, which do everything together; a block stays and takes every grid-th chunk (layout.cuh has
// the offsets):
//   warp      does besides                                     waits for                    says so to                shared memory
//   all       stage of a value block, rows of q and k          barrier(stage), key_barrier  the same                  stages, kRead, kWrite
//   0         thread 0 loads A and P of the first work tile,       pairs_barrier                pairs_barrier             kA, kP
//             thread 192 those of later ones
//   3         the gradient of the log-decay of the work tile before sync_threads
//   5         finds the coords of the work tile after the next two                               sync_threads              kCoords
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/launch.cuh"
#include "scan/cuda/gradients/rows.cuh"
#include "scan/cuda/sm90/gradients/general/loads.cuh"

namespace fw::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    general_gradient_kernel(const __grid_constant__ GradientKernelArgs args) {
  WorkTile<Shape> c(args);
  begin_work_tiles(c);
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
  prefetch_work_tile(c, 1);
  if (c.thread == 0) load_pairs(c, 0);
  ValueStep loaded;
  for (int i = 0; i < Shape::kStages; ++i) {
    load_stage(c, i, loaded.work_tile, loaded.block);
    loaded.next(c.blocks);
  }
  float2 numbers = load_row_scales(c, 0);
  publish_row_scales(c, 0, numbers);
  numbers = load_row_scales(c, 1);
  int step = 0;  // value blocks so far

  int work_tile = 0;
  FW_NO_UNROLL
  for (; c.has(work_tile); ++work_tile) {
    sync_threads();  // the rows and coefficients of the work tile before have been read
    load_keys(c, work_tile);
    mbarrier_wait(c.key_barrier(work_tile), work_tile / 2 & 1);
    GeneralRows::make_streams(c, work_tile);
    mbarrier_wait(c.pairs_barrier(), work_tile & 1);
    fence_async_shared();
    sync_threads();
    c.refresh();
    if (work_tile > 0 && c.warp == 3) store_decay_gradient(c, work_tile - 1);

    StreamSums sums;
    float tail = 0;
    {
      PairSums<Shape> pairs;
      ValueSums z_sums[ValueLanes<Shape>::kPasses] = {};
      const NoDecayState<Shape> still(c, work_tile);
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block, ++step) {
        const int index = step % Shape::kStages, stage = index * Shape::kStageBytes;
        ValueWords<Shape> words;
        mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
        make_value_tiles(c, stage);
        c.refresh();
        start_value_products(c, stage, sums, pairs);
        words.load(c, work_tile, block);
        value_rows(c, work_tile, block, stage, words, z_sums);
        if (!still.by_scans()) tail = dot_states(c, stage, tail);
        const NoDecayWords<Shape> words_of_no_decay(c, still, block);
        finish_value_products(sums, pairs);
        if (still.by_scans()) tail = words_of_no_decay.dot(c, still, stage, tail);
        if (block + 1 == c.blocks) break;
        fence_async_shared();
        sync_threads();
        load_stage(c, index, loaded.work_tile, loaded.block);
        loaded.next(c.blocks);
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
    fence_async_shared();
    sync_threads();
    load_stage(c, step % Shape::kStages, loaded.work_tile, loaded.block);
    loaded.next(c.blocks);
    ++step;

    c.refresh();
    publish_row_scales(c, work_tile + 1, numbers);
    numbers = load_row_scales(c, work_tile + 2);
    if (c.warp == 5) c.find(work_tile + 3);
    prefetch_work_tile(c, work_tile + 2);

    const NoDecayState<Shape> still(c, work_tile);
    const float of_rows = finish_streams(c, work_tile, sums, still.by_rows());
    if (!still.by_scans()) tail = tail * exp2_fast(c.work_tile_floats(Shape::kG, work_tile)[63]) + of_rows;
    tail = warp_sum(tail);
    if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = tail;
    GeneralRows::sum_rows(c, work_tile, sums);
    fence_async_shared();
    sync_threads();
    c.refresh();
    if (c.thread == 6 * 32) load_pairs(c, work_tile + 1);
    if (c.thread < kChunk) GeneralRows::row_scales(c, work_tile, c.thread);
    sync_threads();
    GeneralRows::store_gradients(c, work_tile, sums);
  }
  sync_threads();
  if (work_tile > 0 && c.warp == 3) store_decay_gradient(c, work_tile - 1);
  end_work_tiles(c);
}

template <class Shape>
void launch_general_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  launch_gradients<Shape>(general_gradient_kernel<Shape>, Shape::kThreads, Shape::kBytes, stream,
                          {args, chunks * args.problem.HV, 0, false, pieces_of(args)});
}

}  // namespace fw::cuda
