// The gradient kernel for scalar decay, and none, of rules whose streams are q and k times scales per row
// (common/front/plain.cuh): most of them. A block stays on its processor. Sixteen warps compute, four load what they
// need a work tile ahead.
//
// Roles, 640 threads, one block an SM (layout.cuh has the offsets):
//   warp      does                                             waits for                    says so to                shared memory
//   0 to 15   all products, the front's gradients, stores      full, pairs_full, rows_full  empty, pairs_empty,       read stages, kA, kP, kRead; write
//                                                                                           is_last_of_tile                 kDR, kPartial, kWarpSums
//   16, 17    load W, V, S, D, d_o a value block, A and P a   empty, pairs_empty,          full, pairs_full,         stages, kA, kP, kRead
//             work tile, q and k two work tiles ahead                    is_last_of_tile                    keys_full
//   18, 19    row scales a work tile ahead, coords four; the   keys_full, is_last_of_tile         rows_full, coords_ready    kG, kBeta, kNorms, kCoefs, kCoords
//             gradient of the log-decay
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/launch.cuh"
#include "scan/cuda/sm90/gradients/scalar/loads.cuh"
#include "scan/cuda/sm90/gradients/scalar/precond.cuh"
#include "scan/cuda/sm90/gradients/scalar/rows.cuh"

namespace fw::cuda {

template <class Shape>
FW_DEVICE void compute_chunks(ScalarChunk<Shape>& c) {
  int index = 0, phase = 0;
  FW_NO_UNROLL
  for (int work_tile = 0; c.has(work_tile); ++work_tile) {
    if constexpr (Shape::kMakesM) {
      float start[PrecondRun<Shape>::kN];
      load_start(c, work_tile, PrecondRun<Shape>(c), start);
      mbarrier_wait(c.rows_full(work_tile), work_tile / 2 & 1);
      scale_rows(c, work_tile, start);
    } else {
      mbarrier_wait(c.rows_full(work_tile), work_tile / 2 & 1);
      if constexpr (Shape::kPrecond) make_scaled_rows(c, work_tile);
    }
    mbarrier_wait(c.pairs_full(), work_tile & 1);
    ScalarSums<Shape> sums;
    float tail = 0;
    {
      PairSums<Shape> pairs;
      ValueSums z_sums;
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block) {
        const int at = index * Shape::kStageBytes;
        const uint32_t stage = c.base + at;
        const uint4 words = load_value_words(c, work_tile, block);
        mbarrier_wait(c.full(index), phase);
        c.refresh();
        make_scalar_tiles(c, block, stage);
        c.refresh();
        const ValueRow row = load_value_row(c, work_tile, block, stage);
        start_scalar_products(c, stage, sums, pairs);
        const NoDecayState<Shape> still(c, work_tile);
        if (!still.by_scans()) tail = dot_states(c, at, tail);
        store_value_gradients(c, work_tile, block, at, row, words, z_sums);
        const NoDecayWords<Shape> words_of_no_decay(c, still, block);
        finish_scalar_products(sums, pairs);
        if (still.by_scans()) tail = words_of_no_decay.dot(c, still, at, tail);
        mbarrier_arrive(c.empty(index));
        if (++index == Shape::kStages) index = 0, phase ^= 1;
      }
      if (c.pairs_free_early()) mbarrier_arrive(c.pairs_empty());
      const float z_sum = group_sum<8>(z_sums.gain);
      if ((c.thread & 7) == 0) c.floats(Shape::kDZv)[c.thread >> 3] = z_sum;
      if constexpr (Shape::kNoDecayFix) {
        const float v_dz = group_sum<8>(z_sums.v_dz);
        if ((c.thread & 7) == 0) c.floats(Shape::kVDz)[c.thread >> 3] = v_dz;
      }
      c.refresh();
      store_pair_tiles(c, work_tile, pairs);
    }
    fence_async_shared();
    sync_consumers();

    const int q_tile = Shape::kRead + c.key_offset(work_tile), k_tile = q_tile + Shape::kStateBytes;
    const bool on_read = c.args.problem.rule.preconditions_read();
    const int r_side = Shape::kPrecond && on_read ? Shape::kScaled : q_tile,
              w_side = Shape::kPrecond && !on_read ? Shape::kScaled : k_tile;
    const float of_rows = scale_streams(c, work_tile, sums, w_side);
    if (const NoDecayState<Shape> still(c, work_tile); !still.by_scans())
      tail = tail * exp2_fast(c.work_tile_floats(Shape::kG, work_tile)[63]) +
             (still.by_rows() ? dot_state_streams(c, sums, q_tile, k_tile) : of_rows);
    if constexpr (Shape::kLinear) {
      if (c.mixed()) mix_streams(c, work_tile, sums, q_tile);
    }
    finish_streams(c, work_tile, sums, r_side, w_side);
    sum_stream_rows(c, sums, k_tile, r_side, w_side);
    tail = warp_sum(tail);
    if (c.lane == 0) c.warp_sums(work_tile)[c.warp] = tail;
    if constexpr (Shape::kPrecond) fence_async_shared();  // the sums lie where A comes
    sync_consumers();
    const KeySlopes slopes = stream_row_scales(c, work_tile);
    const bool holds_pairs = Shape::kMakesM && on_read;  // for longer
    if (!c.pairs_free_early() && !holds_pairs) mbarrier_arrive(c.pairs_empty());
    if constexpr (Shape::kMakesM) {
      store_precond_gradients(c, work_tile, sums, slopes);
      if (holds_pairs) {
        fence_async_shared();
        mbarrier_arrive(c.pairs_empty());
      }
    } else {
      store_stream_gradients(c, work_tile, sums, slopes);
    }
    mbarrier_arrive(c.is_last_of_tile(work_tile));
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads + 2 * Shape::kProducers, 1)
    scalar_gradient_kernel(const __grid_constant__ GradientKernelArgs args) {
  ScalarChunk<Shape> c(args);
  begin_work_tiles(c);
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i)
      mbarrier_init(c.full(i), Shape::kProducers + 4), mbarrier_init(c.empty(i), Shape::kThreads);
    mbarrier_init(c.pairs_full(), 1), mbarrier_init(c.pairs_empty(), Shape::kThreads);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(c.keys_full(i), Shape::kProducers), mbarrier_init(c.rows_full(i), Shape::kProducers),
          mbarrier_init(c.is_last_of_tile(i), Shape::kThreads);
    }
    for (int i = 0; Shape::kStages > 2 && i < 4; ++i) mbarrier_init(c.coords_ready(i), 32);
    mbarrier_init_fence();
  }
  if (c.warp < 4) c.find(c.warp);
  sync_threads();
  if (c.warp < Shape::kWarps) {
    register_count_increase<104>();
    compute_chunks(c);
  } else {
    register_count_decrease<64>();
    c.warp < Shape::kWarps + Shape::kProducers / 32 ? copy_chunks(c) : make_row_scales(c);
  }
  end_work_tiles(c);
}

template <class Shape>
void launch_scalar_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  GradientKernelArgs all{args, chunks * args.problem.HV, 0, false, pieces_of(args)};
  if (Shape::kMakesM) all.precond = squash_of_any(args.problem.rule);
  launch_gradients<Shape>(scalar_gradient_kernel<Shape>, Shape::kThreads + 2 * Shape::kProducers, Shape::kBytes, stream,
                          all);
}

}  // namespace fw::cuda
