// The gradient kernel for channel decay. As that for scalar decay (sm90/gradients/general/kernel.cuh) up to dP and dT
// and from dr, de, dw on.
//
// Roles, 4 kTileK threads, which do everything together; a block stays and takes every grid-th chunk (layout.cuh has
// the offsets):
//   warp      does besides                                     waits for                    says so to                shared memory
//   all       stage of a value block; rows are read from       barrier(stage)               the same                  stages, kErase, kRead, kWrite
//             memory by whoever needs them
//   0         thread 0 loads A and P                          pairs_barrier                pairs_barrier             kA, kP
//   0 to 2    find the coords of the first work tiles                                            sync_threads              kCoords
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/channel/mixed.cuh"
#include "scan/cuda/gradients/launch.cuh"
#include "scan/cuda/sm90/gradients/channel/layout.cuh"
#include "scan/cuda/sm90/gradients/channel/rows.cuh"
#include "scan/cuda/sm90/gradients/channel/stages.cuh"

namespace fw::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    channel_gradient_kernel(const __grid_constant__ GradientKernelArgs args) {
  ChannelChunk<Shape> c(args);
  begin_work_tiles(c);
  const auto load_words = [](const ChannelChunk<Shape>& at, int work_tile) {
    if constexpr (Shape::kStreams) {
      return load_row_words(at, work_tile);
    } else {
      return MixedRows::load_words(at, work_tile);
    }
  };
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(c.barrier(i), stage_arrivals(c));
    mbarrier_init(c.pairs_barrier(), 1);
    mbarrier_init_fence();
  }
  if (Shape::kTileK == 64) c.note_blocks();
  if (c.warp == 0) c.make_origins();
  sync_threads();
  if (c.warp < 3) c.find(c.warp);
  sync_threads();
  if (c.thread == 0) load_pairs(c, 0);
  RowWords rows = load_words(c, 0);
  DecayWords decays = load_decay_words(c, 0);
  ValueStep loaded;
  for (int i = 0; i < Shape::kStages; ++i) {
    load_channel_stage(c, i, loaded.work_tile, loaded.block);
    loaded.next(c.value_blocks());
  }
  publish_beta(c, 0, load_beta(c, 0));
  if constexpr (Shape::kMakesM) publish_precond_words(c, load_precond_words(c, 0));

  int work_tile = 0;
  // What follows from the thread's number, and where registers are few from the work tile's, is made again from here
  // on.
  const auto refresh = [&] {
    c.refresh();
    if (Shape::kTileK == 64) work_tile = c.noted_tile();
  };
  FW_NO_UNROLL
  for (; c.has(work_tile); ++work_tile) {
    if (Shape::kTileK == 64) {
      sync_warp();
      c.note_tile(work_tile);
    }
    refresh();
    sum_channel_decay(c, work_tile, decays);
    constexpr bool kLatePairs = Shape::kFused && Shape::kFusedSums == Shape::kA;  // sums of dG lie there until here
    if (kLatePairs) fence_async_shared();
    sync_threads();
    if constexpr (Shape::kFused) {
      if (work_tile > 0) sum_fused(c, work_tile - 1);
      if (kLatePairs && work_tile > 0 && c.thread == 0) load_pairs(c, work_tile);
    }
    if constexpr (Shape::kStreams) {
      make_streams(c, work_tile, rows);
    } else {
      MixedRows::make_streams(c, work_tile, rows);
    }
    join_decays(c);
    prefetch_chunk(c, work_tile + 1);
    mbarrier_wait(c.pairs_barrier(), work_tile & 1);

    // Into the memory of a block's stage, once all warps have used it.
    const auto load_ahead = [&](int block) {
      ValueStep ahead{work_tile, block};
      FW_UNROLL
      for (int i = 0; i < Shape::kStages; ++i) ahead.next(c.value_blocks());
      load_channel_stage(c, (work_tile * c.value_blocks() + block) % Shape::kStages, ahead.work_tile, ahead.block);
    };
    // Of the work tile's last block; where M is made other tiles lie there until the work tile's end.
    const auto last_stage = [&] {
      return (work_tile * c.value_blocks() + c.value_blocks() - 1) % Shape::kStages * Shape::kStageBytes;
    };
    StreamSums sums;
    {
      ChannelPairs<Shape> pairs;
      FW_NO_UNROLL
      for (int block = 0;; ++block) {
        refresh();
        const int step = work_tile * c.value_blocks() + block, index = step % Shape::kStages,
                  stage = index * Shape::kStageBytes;
        // What lives alongside the products in flight are few registers.
        constexpr bool kRoom = Shape::kTileK == 128 && Shape::kStreams;
        ChannelValueWords<Shape> words;
        if (kRoom) words.load(c, work_tile, block, 0);
        mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
        clear_next_rows(c, stage, work_tile);
        if constexpr (kSplitsPairs<Shape>) {
          make_tiles_split_pairs(c, stage);
          fence_async_shared();
          sync_threads();
        } else {
          make_value_tiles(c, stage);
        }
        start_channel_products(c, stage, sums, pairs, [&] {
          if (kRoom) sum_state_dots(c, block, stage);
        });
        if (Shape::kStages > 1 && block > 0) load_ahead(block - 1);  // since the tiles were made all are past it
        if constexpr (kRoom) {
          channel_value_rows(c, work_tile, block, 0, stage, words);
          finish_channel_products(sums, pairs);
        } else {
          finish_channel_products(sums, pairs);
          refresh();
          FW_NO_UNROLL
          for (int pass = 0; pass < ChannelLanes<Shape>::kPasses; ++pass) {
            words.load(c, work_tile, block, pass);
            channel_value_rows(c, work_tile, block, pass, stage, words);
          }
          sum_state_dots(c, block, stage);
        }
        const bool last = block + 1 == c.value_blocks();
        if (Shape::kStages > 1 && !last) continue;
        if (last) store_block_pairs(c, pairs);
        fence_async_shared();
        sync_threads();
        if constexpr (Shape::kMakesM) {
          if (last) fetch_precond_tiles(c, work_tile, stage);
        }
        if (!Shape::kMakesM || !last) load_ahead(block);
        if (last) break;
      }
    }

    refresh();
    if (decays_are(c, Decays::kBounded)) unbound_states(c, work_tile, sums);
    StreamParts parts;
    if constexpr (Shape::kFused) prefetch_logits(c, work_tile);
    if constexpr (Shape::kThirdRow) load_third(c, work_tile, parts);
    if constexpr (Shape::kPrecond && !Shape::kMakesM && Shape::kTileK == 128) load_m(c, work_tile, parts);
    walk_blocks(c, sums);
    refresh();
    if constexpr (Shape::kStreams) {
      finish_streams(c, work_tile, last_stage(), sums, parts);
      if constexpr (Shape::kMakesM) {
        sync_threads();
        refresh();
        float more[2][2];
        add_state_gradients(c, work_tile, last_stage(), sums.w, parts.k, more);
        store_row_sums<2, Shape, 3>(c, c.row(), more[0]);
        store_row_sums<2, Shape, 3>(c, c.row() + 8, more[1]);
      }
      store_row_sums(c, c.row(), parts.sums[0]);
      store_row_sums(c, c.row() + 8, parts.sums[1]);
    } else {
      MixedRows::finish_streams(c, work_tile, sums);
    }
    sync_threads();
    refresh();
    // Else there are too few registers, and at K 64 another block that computes meanwhile.
    constexpr bool kEarly = Shape::kTileK == 128 && (Shape::kDelta || !Shape::kMakesM);
    if (kEarly) decays = load_decay_words(c, work_tile + 1);
    const uint32_t beta = load_beta(c, work_tile + 1);
    PrecondWords gates;
    if constexpr (Shape::kMakesM) gates = load_precond_words(c, work_tile + 1);
    if constexpr (Shape::kMakesM) {
      const int row = c.thread - 6 * 32;
      if (c.warp == 4) store_chunk_share(c, work_tile);
      if (row >= 0 && row < kChunk && row < c.rows(work_tile))
        store_precond_share(c, work_tile, row, row_sum(c, 3, row), row_sum(c, 4, row));
      refresh();
    }
    if (c.thread < kChunk) {
      if constexpr (Shape::kStreams) {
        stream_row_scales(c, work_tile, c.thread);
      } else {
        MixedRows::row_scales(c, work_tile, c.thread);
      }
    } else if (c.warp == 5) {
      c.find(work_tile + 3);
    }
    refresh();
    float2 d_g[Shape::kFused ? 1 : 8];
    if constexpr (Shape::kFused) {
      sum_fused_gradient(c, work_tile);
    } else {
      sum_decay_gradient(c, d_g);
    }
    const bool bounded = decays_are(c, Decays::kBounded);
    fence_async_shared();
    sync_threads();
    if (!kLatePairs && c.thread == 6 * 32) load_pairs(c, work_tile + 1);
    if constexpr (Shape::kFused) {
      store_fused_gradient(c, work_tile, bounded);
    } else {
      store_channel_decay_gradient(c, work_tile, bounded, d_g);
    }
    if constexpr (Shape::kMakesM) publish_precond_words(c, gates);
    // before more is on its way: whatever waits for one of these loads waits for all
    publish_beta(c, work_tile + 1, beta);
    constexpr bool kLast = Shape::kMakesM && Shape::kTileK == 64 && !Shape::kDelta;  // else there are too few registers
    if (!kLast) rows = load_words(c, work_tile + 1);
    if (Shape::kMakesM) load_ahead(c.value_blocks() - 1);  // later than the rows, which are wanted first
    if constexpr (Shape::kStreams) {
      store_stream_gradients(c, work_tile, sums, parts);
    } else {
      MixedRows::store_gradients(c, work_tile, sums);
    }
    refresh();
    if (kLast) rows = load_words(c, work_tile + 1);
    if (!kEarly) decays = load_decay_words(c, work_tile + 1);
  }
  if constexpr (Shape::kFused) {
    sync_threads();
    if (work_tile > 0) sum_fused(c, work_tile - 1);
  }
  end_work_tiles(c);
}

template <class Shape>
void launch_channel_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  const unsigned pieces = pieces_of(args) | channel_pieces_of(args, Shape::kOwnKey ? d.erase_key : d.erase_gate);
  GradientKernelArgs all{args, chunks * x.HV, 0, false, pieces};
  if (Shape::kMakesM) all.precond = squash_of_any(x.rule);
  all.tma = Shape::kTma && make_tensor_map(args.d_o, args.shape.B, args.shape.T, x.HV / args.d_o.divisor, x.V, all.d_o);
  launch_gradients<Shape>(channel_gradient_kernel<Shape>, Shape::kThreads, Shape::kBytes, stream, all);
}

}  // namespace fw::cuda
