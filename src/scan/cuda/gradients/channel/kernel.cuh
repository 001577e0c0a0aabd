// The gradient kernel for channel decay. As that for scalar decay (gradients/general/kernel.cuh) up to dP and dT and from dr, de, dw on.
//
// Roles, 4 kKey threads, which do everything together; a block stays and takes every grid-th chunk (layout.cuh has the places):
//   warp      does besides                                     waits for                    says so to                shared memory
//   all       stage of a value block; rows are read from       barrier(stage)               the same                  stages, kErase, kRead, kWrite
//             memory by whoever needs them
//   0         thread 0 brings A and P                          pairs_barrier                pairs_barrier             kA, kP
//   0 to 2    find the places of the first turns                                            sync_threads              kPlaces
#pragma once

#include "scan/cuda/gradients/channel/mixed.cuh"
#include "scan/cuda/gradients/common/launch.cuh"

namespace fw::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) channel_gradient_kernel(const __grid_constant__ GradientKernelArgs args) {
  ChannelChunk<Shape> c(args);
  begin_turns(c);
  const auto load_words = [](const ChannelChunk<Shape>& at, int turn) {
    if constexpr (Shape::kStreams) {
      return load_row_words(at, turn);
    } else {
      return MixedRows::load_words(at, turn);
    }
  };
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(c.barrier(i), stage_arrivals(c));
    mbarrier_init(c.pairs_barrier(), 1);
    mbarrier_init_fence();
  }
  if (Shape::kKey == 64) c.note_blocks();
  if (c.warp == 0) c.make_origins();
  sync_threads();
  if (c.warp < 3) c.find(c.warp);
  sync_threads();
  if (c.thread == 0) load_pairs(c, 0);
  RowWords rows = load_words(c, 0);
  DecayWords decays = load_decay_words(c, 0);
  ValueStep loaded;
  for (int i = 0; i < Shape::kStages; ++i) {
    load_channel_stage(c, i, loaded.turn, loaded.block);
    loaded.next(c.value_blocks());
  }
  publish_beta(c, 0, load_beta(c, 0));
  if constexpr (Shape::kMakesM) publish_precond_words(c, load_precond_words(c, 0));

  int turn = 0;
  // What follows from the thread's number, and where registers are few from the turn's, is made again from here on.
  const auto refresh = [&] {
    c.refresh();
    if (Shape::kKey == 64) turn = c.noted_turn();
  };
  FW_NO_UNROLL
  for (; c.has(turn); ++turn) {
    if (Shape::kKey == 64) {
      sync_warp();
      c.note_turn(turn);
    }
    refresh();
    sum_channel_decay(c, turn, decays);
    constexpr bool kLatePairs = Shape::kFormed && Shape::kFormedSums == Shape::kA;  // sums of dG lie there until here
    if (kLatePairs) fence_async_shared();
    sync_threads();
    if constexpr (Shape::kFormed) {
      if (turn > 0) sum_formed(c, turn - 1);
      if (kLatePairs && turn > 0 && c.thread == 0) load_pairs(c, turn);
    }
    if constexpr (Shape::kStreams) {
      make_streams(c, turn, rows);
    } else {
      MixedRows::make_streams(c, turn, rows);
    }
    join_decays(c);
    prefetch_chunk(c, turn + 1);
    mbarrier_wait(c.pairs_barrier(), turn & 1);

    // Into the place of a block's stage, once all warps have used it.
    const auto load_ahead = [&](int block) {
      ValueStep ahead{turn, block};
      FW_UNROLL
      for (int i = 0; i < Shape::kStages; ++i) ahead.next(c.value_blocks());
      load_channel_stage(c, (turn * c.value_blocks() + block) % Shape::kStages, ahead.turn, ahead.block);
    };
    // Of the turn's last block; where M is made other tiles lie there until the turn's end.
    const auto last_stage = [&] { return (turn * c.value_blocks() + c.value_blocks() - 1) % Shape::kStages * Shape::kStageBytes; };
    StreamSums sums;
    {
      ChannelPairs<Shape> pairs;
      FW_NO_UNROLL
      for (int block = 0;; ++block) {
        refresh();
        const int step = turn * c.value_blocks() + block, index = step % Shape::kStages, stage = index * Shape::kStageBytes;
        // What lives beside the products in flight are few registers.
        constexpr bool kRoom = Shape::kKey == 128 && Shape::kStreams;
        ChannelValueWords<Shape> words;
        if (kRoom) words.load(c, turn, block, 0);
        mbarrier_wait(c.barrier(index), step / Shape::kStages & 1);
        clear_next_rows(c, stage, turn);
        if constexpr (kByHalves<Shape>) {
          make_tiles_by_halves(c, stage);
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
          channel_value_rows(c, turn, block, 0, stage, words);
          finish_channel_products(sums, pairs);
        } else {
          finish_channel_products(sums, pairs);
          refresh();
          FW_NO_UNROLL
          for (int pass = 0; pass < ChannelLanes<Shape>::kPasses; ++pass) {
            words.load(c, turn, block, pass);
            channel_value_rows(c, turn, block, pass, stage, words);
          }
          sum_state_dots(c, block, stage);
        }
        const bool last = block + 1 == c.value_blocks();
        if (Shape::kStages > 1 && !last) continue;
        if (last) store_block_pairs(c, pairs);
        fence_async_shared();
        sync_threads();
        if constexpr (Shape::kMakesM) {
          if (last) fetch_precond_tiles(c, turn, stage);
        }
        if (!Shape::kMakesM || !last) load_ahead(block);
        if (last) break;
      }
    }

    refresh();
    if (decays_are(c, Decays::kBounded)) unbound_states(c, turn, sums);
    StreamParts parts;
    if constexpr (Shape::kFormed) prefetch_logits(c, turn);
    if constexpr (Shape::kThirdRow) load_third(c, turn, parts);
    if constexpr (Shape::kPrecond && !Shape::kMakesM && Shape::kKey == 128) load_m(c, turn, parts);
    walk_blocks(c, sums);
    refresh();
    if constexpr (Shape::kStreams) {
      finish_streams(c, turn, last_stage(), sums, parts);
      if constexpr (Shape::kMakesM) {
        sync_threads();
        refresh();
        float more[2][2];
        add_state_gradients(c, turn, last_stage(), sums.w, parts.k, more);
        store_row_sums<2, Shape, 3>(c, c.row(), more[0]);
        store_row_sums<2, Shape, 3>(c, c.row() + 8, more[1]);
      }
      store_row_sums(c, c.row(), parts.sums[0]);
      store_row_sums(c, c.row() + 8, parts.sums[1]);
    } else {
      MixedRows::finish_streams(c, turn, sums);
    }
    sync_threads();
    refresh();
    // Else there are too few registers, and at K 64 another block that computes meanwhile.
    constexpr bool kEarly = Shape::kKey == 128 && (Shape::kOnline || !Shape::kMakesM);
    if (kEarly) decays = load_decay_words(c, turn + 1);
    const uint32_t beta = load_beta(c, turn + 1);
    PrecondWords gates;
    if constexpr (Shape::kMakesM) gates = load_precond_words(c, turn + 1);
    if constexpr (Shape::kMakesM) {
      const int row = c.thread - 6 * 32;
      if (c.warp == 4) store_chunk_share(c, turn);
      if (row >= 0 && row < kChunk && row < c.rows(turn)) store_precond_share(c, turn, row, row_sum(c, 3, row), row_sum(c, 4, row));
      refresh();
    }
    if (c.thread < kChunk) {
      if constexpr (Shape::kStreams) {
        stream_row_numbers(c, turn, c.thread);
      } else {
        MixedRows::row_numbers(c, turn, c.thread);
      }
    } else if (c.warp == 5) {
      c.find(turn + 3);
    }
    refresh();
    float2 d_g[Shape::kFormed ? 1 : 8];
    if constexpr (Shape::kFormed) {
      sum_formed_gradient(c, turn);
    } else {
      sum_decay_gradient(c, d_g);
    }
    const bool bounded = decays_are(c, Decays::kBounded);
    fence_async_shared();
    sync_threads();
    if (!kLatePairs && c.thread == 6 * 32) load_pairs(c, turn + 1);
    if constexpr (Shape::kFormed) {
      store_formed_gradient(c, turn, bounded);
    } else {
      store_channel_decay_gradient(c, turn, bounded, d_g);
    }
    if constexpr (Shape::kMakesM) publish_precond_words(c, gates);
    publish_beta(c, turn + 1, beta);  // before more is on its way: whatever waits for one of these loads waits for all
    constexpr bool kLast = Shape::kMakesM && Shape::kKey == 64 && !Shape::kOnline;  // else there are too few registers
    if (!kLast) rows = load_words(c, turn + 1);
    if (Shape::kMakesM) load_ahead(c.value_blocks() - 1);  // later than the rows, which are wanted first
    if constexpr (Shape::kStreams) {
      store_stream_gradients(c, turn, sums, parts);
    } else {
      MixedRows::store_gradients(c, turn, sums);
    }
    refresh();
    if (kLast) rows = load_words(c, turn + 1);
    if (!kEarly) decays = load_decay_words(c, turn + 1);
  }
  if constexpr (Shape::kFormed) {
    sync_threads();
    if (turn > 0) sum_formed(c, turn - 1);
  }
  end_turns(c);
}

template <class Shape>
void launch_channel_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  const auto whole_or_absent = [](const TokenArg& tensor, int dim) { return tensor.data == nullptr || whole_pieces(tensor, dim); };
  const bool gated = x.rule.write == Gate::kChannel;
  const bool values =
      whole_pieces(x.in.v, x.V) && whole_or_absent(d.v, x.V) && (!gated || (whole_pieces(x.in.write_gate, x.V) && whole_or_absent(d.write_gate, x.V)));
  const unsigned channel_pieces = (whole_pieces(Shape::kOwnKey ? d.erase_key : d.erase_gate, x.K) ? kPiecesDThird : 0u) |
                                  (whole_pairs(x.in.g, x.K) ? kPairsG : 0u) | (whole_pairs(d.g, x.K) ? kPairsDG : 0u) | (values ? kPiecesValues : 0u);
  GradientKernelArgs all{args, chunks * x.HV, 0, false, pieces_of(args) | channel_pieces};
  if (Shape::kMakesM) all.precond = squash_of_any(x.rule);
  all.engine = Shape::kEngine && make_tensor_map(args.d_o, args.shape.B, args.shape.T, x.HV / args.d_o.divisor, x.V, all.d_o);
  launch_gradients<Shape>(channel_gradient_kernel<Shape>, Shape::kThreads, Shape::kBytes, stream, all);
}

}  // namespace fw::cuda
