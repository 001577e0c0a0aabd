// The reverse scan of keys of 129 to 256 channels, from the raw rows of q and k and A and P of every chunk (tiles.h: WideNumbers). Per sequence and value head,
// from the last chunk on, with D the gradient of the state:
//   dR = P^T dO + diag(k) k D      dZ = A^T dR      D = gamma D + q^T diag(q) dO + k^T diag(e) dZ          (offline rules: V = diag(k) k D, and D without dZ)
// Writes, if asked for, D^T at the end of every chunk (before the step) and dZ (V) of every chunk for the gradients, and the gradient of the initial state.
// Products take bf16 operands and add in float32; D stays float32 throughout.
//
// Roles, 256 threads, one block a multiprocessor (wide/parts.cuh):
//   warp     does                                              waits for                    says so to                  shared memory
//   0, 1     bring k, q, A, P, d_o and numbers of a chunk      stages.empty                 stages.full                 stages
//   2        thread 64 takes D^T away                          state.full                   state.empty                 kState
//   3        thread 96 takes dZ (V) away                       tile.full                    stages.empty                kTile of a stage
//   4 to 7   the state's gradient in registers: dR, dZ, D      stages.full, state.empty     stages.empty, tile.full,    read stages, write kTile, kState
//                                                                                           state.full
#include "scan/cuda/call/launch.h"
#include "scan/cuda/wide/parts.cuh"

namespace fw::cuda {
namespace {

struct WideReverseArgs {
  ScanReverseArgs scan;
  const WideNumbers* numbers;
};

template <bool kOnline, bool kSave>
__global__ void __launch_bounds__(kScanThreads, 1) wide_reverse_kernel(const __grid_constant__ WideReverseArgs all, const __grid_constant__ StageMaps maps) {
  using Shape = WideShape<false>;
  const ScanReverseArgs& args = all.scan;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.stages.init(1 + static_cast<int>(kStoreThread), kStateThreads + (kSave ? 1 : 0));
    barriers.tile.init(kStateThreads, 1);
    barriers.state.init(kStateThreads, 1);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const int value_blocks = (args.V + kValueBlock - 1) / kValueBlock;
  const ScanPlace place = scan_place(args.sequences, args.HV, value_blocks, 0);

  if (thread_index() < kStoreThread) {
    const WideStageArgs stage_args{args.sequences, args.rows, args.d_o, args.pairs, all.numbers, args.HV, args.K, args.V};
    const EnginePlace engine(args.sequences, place);
    Ring<Shape::kStages> ring;
    for (int c = place.chunks - 1; c >= 0; --c, ring.next()) {
      barriers.stages.wait_empty(ring);
      bring_wide_stage<Shape, kOnline, kOnline>(stage_args, maps, engine, place, c, shared + ring.slot * Shape::kStage, barriers.stages.full + ring.slot);
    }
  } else if (thread_index() < kStateThread) {
    const bool drains_state = kSave && thread_index() == kStoreThread, drains_tile = kSave && thread_index() == kStoreThread + 32;
    if (!drains_state && !drains_tile) return;
    Ring<Shape::kStages> ring;
    Ring<1> single;
    for (int c = place.chunks - 1; c >= 0; --c, ring.next(), single.next()) {
      const int64_t tile = (place.first_tile + static_cast<int64_t>(c) * args.HV) * value_blocks + place.value_block;
      if (drains_state) {
        barriers.state.wait_full(single);
        drain_bulk(args.d_states + tile * (64 * kWideKey), shared + Shape::kState, Shape::kMatrix, barriers.state.empty);
      } else {
        barriers.tile.wait_full(ring);
        drain_bulk(args.v + tile * kPanel, shared + ring.slot * Shape::kStage + Shape::kTile, kPanelBytes, barriers.stages.empty + ring.slot);
      }
    }
    bulk_wait<0>();
  } else {
    float state[kWideKey / 2];
    load_state(args.d_final_state, place, place.n, args.K, args.V, state);
    const uint32_t base = shuffle(shared_address(shared), 0);  // known to the compiler as a number only: else it reads it anew in every round
    Ring<Shape::kStages> ring;
    Ring<1> leaving;
    const auto numbers = [&] { return reinterpret_cast<const WideNumbers*>(shared + ring.slot * Shape::kStage + Shape::kNumbers); };
    FW_NO_UNROLL
    for (int left = place.chunks; left > 0; --left, ring.next(), leaving.next()) {
      const uint32_t stage = base + ring.slot * Shape::kStage;
      barriers.stages.wait_full(ring);
      if constexpr (kSave) barriers.state.wait_empty(leaving);
      put_wide_state(state, base + Shape::kState, numbers()->gamma[0]);
      if constexpr (kSave) barriers.state.put_full(leaving);
      uint32_t d_o[4][4], b[4][4];
      float v[32];
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], stage + Shape::kTile, k);
      constexpr bool kReads = kOnline || kSave;  // D
      float r[32];
      wgmma_fence();
      if constexpr (kReads) multiply_state(v, base + Shape::kState, stage + Shape::kK);
      if constexpr (kOnline) multiply_outer(r, d_o, stage + Shape::kP);
      wgmma_commit();
      scale_fragments(d_o, numbers()->q, b);
      wgmma_fence();
      add_outer<kWideKey>(state, b, stage + Shape::kQ);
      wgmma_commit();
      if constexpr (kReads) {
        wgmma_wait<1>();
        keep(v);
        scale_columns(v, numbers()->k);
      }
      uint32_t a[4][4];
      if constexpr (kOnline) {
        keep(r);
        FW_UNROLL
        for (int i = 0; i < 32; ++i) v[i] += r[i];
        pack_fragments(v, a);
        wgmma_fence();
        multiply_outer(v, a, stage + Shape::kA);
        wgmma_commit();
        wgmma_wait<0>();
        keep(v);
        keep(state);
      }
      if constexpr (kSave) {
        pack_fragments(v, a);
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_token_fragment(stage + Shape::kTile, k, a[k]);
        fence_async_shared();
        barriers.tile.put_full(ring);
      }
      if constexpr (kOnline) {
        scale_columns(v, numbers()->e);
        pack_fragments(v, a);
        wgmma_fence();
        add_outer<kWideKey>(state, a, stage + Shape::kK);
        wgmma_commit();
      }
      wgmma_wait<0>();
      keep(state);
      barriers.stages.put_empty(ring);
    }
    store_state(args.d_initial_state, place, place.n, args.K, args.V, state);
  }
}

template <bool kOnline, bool kSave>
void launch_reverse(const WideReverseArgs& all, void* stream) {
  const ScanReverseArgs& args = all.scan;
  const unsigned blocks = static_cast<unsigned>((args.V + kValueBlock - 1) / kValueBlock);
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.HV) * blocks, 1, 1};
  launch_overlapped(wide_reverse_kernel<kOnline, kSave>, grid, kScanThreads, WideShape<false>::kShared, stream, all,
                    wide_maps(args.rows, args.d_o, args.shape, args.HV, args.K, args.V));
}

}  // namespace

void wide_reverse(const ScanReverseArgs& args, const WideNumbers* numbers, void* stream) {
  if ((args.d_states == nullptr) != (args.v == nullptr)) fail_internal("wide_reverse: d_states and v are saved together or not at all");
  if (args.K > kWideKey || args.parts != nullptr || args.made != nullptr) {
    fail_internal("wide_reverse: expected K at most {} and whole sequences, got K {}", kWideKey, args.K);
  }
  const WideReverseArgs all{args, numbers};
  const bool save = args.d_states != nullptr;
  if (args.online) {
    save ? launch_reverse<true, true>(all, stream) : launch_reverse<true, false>(all, stream);
  } else {
    save ? launch_reverse<false, true>(all, stream) : launch_reverse<false, false>(all, stream);
  }
}

}  // namespace fw::cuda
