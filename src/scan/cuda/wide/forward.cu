// The forward scan of keys of 129 to 256 channels, from the raw rows of q and k and A and P of every chunk (tiles.h: WideNumbers), without images. Per sequence
// and value head, chunk by chunk:
//   W = diag(z) v + diag(e) k S      U = A W      O = diag(q) q S + P U      S = gamma S + k^T diag(k) U          (offline rules: W = diag(z) v, U = W)
// A for itself is a product more than the images of scan/forward.cu have, and spares [64, 256] numbers of a chunk that every value block would bring.
// Writes o (rows of each sequence only) and the final states, and for the gradients S^T at the start of every chunk and W of every chunk.
// Products take bf16 operands and add in float32; S stays float32 throughout.
//
// Roles, 256 threads, one block a multiprocessor (wide/parts.cuh):
//   warp     does                                              waits for                    says so to                  shared memory
//   0, 1     bring k, q, A, P, v and numbers of a chunk        stages.empty                 stages.full                 stages
//   2        thread 64 takes S^T away; with 3 bf16 rows of O   state.full, o.full           state.empty, o.empty        kState, kO
//   3        thread 96 takes W away; with 2 bf16 rows of O     tile.full, o.full            stages.empty, o.empty       kTile of a stage, kO
//   4 to 7   the state in registers: W, U, O, S of a chunk     stages.full, {o, state}      stages.empty, tile.full,    read stages, write kTile, kO, kState
//                                                              .empty                       {o, state}.full
#include "scan/cuda/call/launch.h"
#include "scan/cuda/scan/outputs.cuh"
#include "scan/cuda/wide/parts.cuh"

namespace fw::cuda {
namespace {

struct WideForwardArgs {
  ScanForwardArgs scan;
  const WideNumbers* numbers;
  const PairImage* pairs;
};

template <bool kOnline, bool kOut, bool kSave>
__global__ void __launch_bounds__(kScanThreads, 1) wide_forward_kernel(const __grid_constant__ WideForwardArgs all, const __grid_constant__ StageMaps maps) {
  using Shape = WideShape<kOut>;
  const ScanForwardArgs& args = all.scan;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.stages.init(1 + static_cast<int>(kStoreThread), kStateThreads + (kSave ? 1 : 0));
    barriers.tile.init(kStateThreads, 1);
    barriers.state.init(kStateThreads, 1);
    barriers.o.init(kStateThreads, 64);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const int value_blocks = (args.V + kValueBlock - 1) / kValueBlock;
  const ScanPlace place = scan_place(args.sequences, args.HV, value_blocks, 0);

  if (thread_index() < kStoreThread) {
    const WideStageArgs stage_args{args.sequences, args.rows, args.v, all.pairs, all.numbers, args.HV, args.K, args.V};
    const EnginePlace engine(args.sequences, place);
    Ring<Shape::kStages> ring;
    for (int c = 0; c < place.chunks; ++c, ring.next()) {
      barriers.stages.wait_empty(ring);
      bring_wide_stage<Shape, kOnline, kOut>(stage_args, maps, engine, place, c, shared + ring.slot * Shape::kStage, barriers.stages.full + ring.slot);
    }
  } else if (thread_index() < kStateThread) {
    const bool drains_state = kSave && thread_index() == kStoreThread, drains_tile = kSave && thread_index() == kStoreThread + 32;
    const TileRows o = tile_rows(args.o, args.sequences, place, args.V);
    Ring<Shape::kStages> ring;
    Ring<1> single;
    for (int c = 0; c < place.chunks; ++c, ring.next(), single.next()) {
      const int64_t tile = (place.first_tile + static_cast<int64_t>(c) * args.HV) * value_blocks + place.value_block;
      if (drains_state) {
        barriers.state.wait_full(single);
        drain_bulk(args.states + tile * (64 * kWideKey), shared + Shape::kState, Shape::kMatrix, barriers.state.empty);
      }
      if (drains_tile) {
        barriers.tile.wait_full(ring);
        drain_bulk(args.w + tile * kPanel, shared + ring.slot * Shape::kStage + Shape::kTile, kPanelBytes, barriers.stages.empty + ring.slot);
      }
      if (kOut && o.rows.bf16 != 0) {
        barriers.o.wait_full(single);
        store_bf16_rows(o, c, shared + Shape::kO);
        barriers.o.put_empty(single);
      }
    }
    if (drains_state || drains_tile) bulk_wait<0>();
  } else {
    const TileRows out = tile_rows(args.o, args.sequences, place, args.V);
    float state[kWideKey / 2];
    load_state(args.initial_state, place, place.n, args.K, args.V, state);
    const uint32_t base = shuffle(shared_address(shared), 0);  // known to the compiler as a number only: else it reads it anew in every round
    Ring<Shape::kStages> ring;
    Ring<1> leaving;
    CheckpointWalk checkpoints(args.checkpoints, args.sequences, place);
    const auto numbers = [&] { return reinterpret_cast<const WideNumbers*>(shared + ring.slot * Shape::kStage + Shape::kNumbers); };
    FW_NO_UNROLL
    for (int c = 0; c < place.chunks; ++c, ring.next(), leaving.next()) {
      const uint32_t stage = base + ring.slot * Shape::kStage;
      barriers.stages.wait_full(ring);
      if constexpr (kSave) barriers.state.wait_empty(leaving);
      put_wide_state(state, base + Shape::kState, numbers()->gamma[0]);
      if constexpr (kSave) barriers.state.put_full(leaving);
      float w[32], o[32];
      wgmma_fence();
      if constexpr (kOnline) {
        multiply_state(w, base + Shape::kState, stage + Shape::kK);
        wgmma_commit();
      }
      if constexpr (kOut) {
        multiply_state(o, base + Shape::kState, stage + Shape::kQ);
        wgmma_commit();
      }
      uint32_t b[4][4];
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(b[k], stage + Shape::kTile, k);
      if constexpr (kOnline) {
        wgmma_wait<kOut ? 1 : 0>();
        keep(w);
        scale_columns(w, numbers()->e);
        add_fragments(w, b, numbers()->z);
        pack_fragments(w, b);
      } else {
        scale_fragments(b, numbers()->z, b);
      }
      if constexpr (kSave) {
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_token_fragment(stage + Shape::kTile, k, b[k]);
        fence_async_shared();
        barriers.tile.put_full(ring);
      }
      if constexpr (kOnline) {
        wgmma_fence();
        multiply_rows(w, b, stage + Shape::kA, false);
        wgmma_commit();
        wgmma_wait<0>();
        keep(w);
        pack_fragments(w, b);
      } else if constexpr (kOut) {
        wgmma_wait<0>();
      }
      uint32_t scaled[4][4];
      scale_fragments(b, numbers()->k, scaled);
      if constexpr (kOut) {
        keep(o);
        scale_columns(o, numbers()->q);
      }
      wgmma_fence();
      add_outer<kWideKey>(state, scaled, stage + Shape::kK);
      if constexpr (kOut) multiply_rows(o, b, stage + Shape::kP, true);
      wgmma_commit();
      wgmma_wait<0>();
      keep(state);
      if constexpr (kOut) keep(o);
      barriers.stages.put_empty(ring);
      if (kOut && checkpoints.reached()) [[unlikely]]  // without o the call is not the caller's
        store_state(args.checkpoints.states, place, checkpoints.next(args.checkpoints, place, c), args.K, args.V, state);
      if constexpr (kOut) {
        if (out.rows.bf16 == 0) {
          store_float_rows(out, c, o);
        } else {
          pack_fragments(o, b);
          barriers.o.wait_empty(leaving);
          FW_UNROLL
          for (int k = 0; k < 4; ++k) store_token_fragment(base + Shape::kO, k, b[k]);
          barriers.o.put_full(leaving);
        }
      }
    }
    store_state(args.final_state, place, place.n, args.K, args.V, state);
  }
}

template <bool kOnline, bool kOut, bool kSave>
void launch_forward(const WideForwardArgs& all, void* stream) {
  const ScanForwardArgs& args = all.scan;
  const unsigned blocks = static_cast<unsigned>((args.V + kValueBlock - 1) / kValueBlock);
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.HV) * blocks, 1, 1};
  launch_overlapped(wide_forward_kernel<kOnline, kOut, kSave>, grid, kScanThreads, WideShape<kOut>::kShared, stream, all,
                    wide_maps(args.rows, args.v, args.shape, args.HV, args.K, args.V));
}
template <bool kOnline>
void launch_forward(const WideForwardArgs& all, void* stream) {
  const bool save = all.scan.states != nullptr;
  if (all.scan.o.data != nullptr) {
    save ? launch_forward<kOnline, true, true>(all, stream) : launch_forward<kOnline, true, false>(all, stream);
  } else {
    save ? launch_forward<kOnline, false, true>(all, stream) : launch_forward<kOnline, false, false>(all, stream);
  }
}

}  // namespace

void wide_forward(const ScanForwardArgs& args, const WideNumbers* numbers, const PairImage* pairs, void* stream) {
  if ((args.states == nullptr) != (args.w == nullptr)) fail_internal("wide_forward: states and w are saved together or not at all");
  if (args.K > kWideKey || args.parts != nullptr || args.maps.data != nullptr || args.z != nullptr) {
    fail_internal("wide_forward: expected K at most {} and whole sequences with raw values, got K {}", kWideKey, args.K);
  }
  const WideForwardArgs all{args, numbers, pairs};
  args.online ? launch_forward<true>(all, stream) : launch_forward<false>(all, stream);
}

}  // namespace fw::cuda
