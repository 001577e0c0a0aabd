// The reverse scan of keys of 129 to 256 channels, from the raw rows of q and k and A and P of every chunk (tiles.h: ChunkNumbers). Per sequence and value
// head, from the last chunk on, with D the gradient of the state:
//   dR = P^T dO + diag(k) k D      dZ = A^T dR      D = gamma D + q^T diag(q) dO + k^T diag(e) dZ          (offline rules: V = diag(k) k D, and D without dZ)
// Where streams are sums of q and k: D = gamma D + q^T (diag(q) dO + diag(erase_q) dZ) + k^T (diag(read_k) dO + diag(e) dZ); then q is the last that is wanted.
// Where channels decay each by its own dR = P^T dO + Khat D, D = Diag(gamma) D + Q^T dO + E^T dZ of images (tiles.h: StreamImage), which come one by one.
// Writes, if asked for, D^T at the end of every chunk (before the step) and dZ (V) of every chunk for the gradients, and the gradient of the initial state.
// Products take bf16 operands and add in float32; D stays float32 throughout.
//
// Roles, 384 threads, one block a multiprocessor (wide/parts.cuh), i the group; with images k has the places kE and kKhat and the barriers e and khat:
//   warp     does                                               waits for                    says so to                  shared memory
//   0, 1     bring k, numbers and d_o, then q, A, P of a chunk  {stages, q, a, p}.empty      {stages, q, a, p}.full      kK, kNumbers, kTile, kQ, kA, kP
//   2        thread 64 takes D^T away                           state[i].full                state[i].empty              kState
//   3        thread 96 takes dZ (V) away                        left[i].full                 stages.empty                kTile
//   4 to 7,  the gradient of the state of a group's value       {stages, q, a, p}.full,      {stages, q, a, p}.empty,    read those, write kTile, kState
//   8 to 11  block in registers: dR, dZ, D                      state[i].empty               {left, state}[i].full
#include <type_traits>

#include "scan/cuda/call/launch.h"
#include "scan/cuda/wide/parts.cuh"

namespace fw::cuda {
namespace {

struct WideReverseArgs {
  ScanReverseArgs scan;
  WideImages images;
  int groups;
};

template <WideForm kForm, bool kSave>
__global__ void __launch_bounds__(kWideThreads, 1) wide_reverse_kernel(const __grid_constant__ WideReverseArgs all, const __grid_constant__ StageMaps maps) {
  constexpr bool kOnline = kForm != WideForm::kOffline, kSums = kForm == WideForm::kSums, kImages = kForm == WideForm::kKeys;
  using Shape = WideShape<false, kForm>;
  using Registers = WideRegisters<56, 224>;
  const ScanReverseArgs& args = all.scan;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) init_wide_barriers<Shape>(barriers, wide_place(args.sequences, args.HV, args.V, all.groups).groups, kSave);
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();

  if (thread_index() < kStateThread) {
    register_count_decrease<Registers::kOfMovers>();
    const WidePlace place = wide_place(args.sequences, args.HV, args.V, all.groups);
    const int last = place.scan.chunks - 1;
    if (thread_index() < kStoreThread) {
      const WideStageArgs stage_args{args.sequences, args.rows, args.d_o, all.images, nullptr, args.HV, args.K, args.V};
      const auto from_the_last = [last](int i) { return last - i; };
      if constexpr (kImages) {
        bring_wide_images<Shape, true, true>(stage_args, maps, place, shared, barriers, from_the_last);
      } else {
        bring_wide_chunks<Shape, true, kSums, kOnline, kOnline>(stage_args, maps, place, shared, barriers, from_the_last);
      }
      return;
    }
    if (!kSave || thread_index() % 32 != 0) return;
    Ring<Shape::kStages> ring;
    Ring<1> single;
    FW_NO_UNROLL
    for (int c = last; c >= 0; --c, ring.next(), single.next()) {
      FW_NO_UNROLL
      for (int group = 0; group < place.groups; ++group) drain_wide<Shape>(place, group, args.HV, c, ring, single, shared, barriers, args.d_states, args.v);
    }
    bulk_wait<0>();
  } else {
    register_count_increase<Registers::kOfState>();
    const int group = shuffle(static_cast<int>(thread_index() - kStateThread) / kStateThreads, 0);
    const auto own = [&] { return find_wide_group(args.sequences, args.HV, args.V, all.groups, group); };
    if (const WidePlace place = wide_place(args.sequences, args.HV, args.V, all.groups); group >= place.groups) return;
    float state[kWideKey / 2];
    {
      const ScanPlace place = own();
      load_state(args.d_final_state, place, place.n, args.K, args.V, state);
    }
    const int chunks = own().chunks;
    const uint32_t base = shuffle(shared_address(shared), 0);  // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t numbers_of_state = base + Shape::kState + static_cast<uint32_t>(group * Shape::kMatrix);
    FW_NO_UNROLL
    for (int i = 0; i < chunks; ++i) {
      const auto ring = Shape::stage_of(i);
      const auto single = Shape::single_of(i);
      using Numbers = std::conditional_t<kImages, WideDecays, ChunkNumbers>;
      const auto numbers = [&] { return reinterpret_cast<const Numbers*>(shared + opaque(Shape::kNumbers + ring.slot * Shape::kNumberBytes)); };
      // Of images, which have one place: made anew each time, or descriptors of all of them are kept in registers.
      const auto anew = [&](uint32_t address) { return kImages ? static_cast<uint32_t>(opaque(static_cast<int>(address))) : address; };
      const uint32_t keys = kImages ? anew(base + Shape::kKhat) : base + Shape::kK + static_cast<uint32_t>(ring.slot * Shape::kMatrix);
      const uint32_t tile = base + static_cast<uint32_t>(Shape::tile(ring.slot, group));
      constexpr bool kReads = kOnline || kSave;  // D
      barriers.stages.wait_full(ring);
      if constexpr (kSave) barriers.state[group].wait_empty(single);
      put_wide_state<kImages>(state, numbers_of_state, numbers()->gamma, group);
      if constexpr (kSave) barriers.state[group].put_full(single);
      uint32_t d_o[4][4], a[4][4];
      float v[32];
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], tile, k);
      if constexpr (kImages) barriers.khat.wait_full(single);
      wgmma_fence();
      if constexpr (kReads) {
        multiply_state(v, numbers_of_state, keys);
        wgmma_commit();
        if constexpr (kImages) scale_columns(state, numbers()->gamma);  // while the product runs, which does not touch it
      }
      if constexpr (!kSums) {
        if constexpr (!kImages) scale_fragments(d_o, numbers()->q, a);
        barriers.q.wait_full(single);
        wgmma_fence();
        add_outer<kWideKey>(state, kImages ? d_o : a, anew(base + Shape::kQ));
        wgmma_commit();
      }
      if constexpr (kReads) {
        wgmma_wait<kSums ? 0 : 1>();
        keep(v);
        if constexpr (kImages) {
          barriers.khat.put_empty(single);
        } else {
          scale_columns(v, numbers()->k);
        }
      }
      if constexpr (kOnline) {
        barriers.p.wait_full(single);
        wgmma_fence();
        multiply_outer(v, d_o, base + Shape::kP, true);
        wgmma_commit();
        wgmma_wait<0>();
        keep(v);
        keep(state);
        barriers.p.put_empty(single);
        if constexpr (!kSums) barriers.q.put_empty(single);
        pack_fragments(v, a);
        barriers.a.wait_full(single);
        wgmma_fence();
        multiply_outer(v, a, base + Shape::kA);
        wgmma_commit();
        wgmma_wait<0>();
        keep(v);
        barriers.a.put_empty(single);
      }
      if constexpr (kSave) {
        pack_fragments(v, a);
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_token_fragment(tile, k, a[k]);
        fence_async_shared();
        barriers.left[group].put_full(ring);
      }
      if constexpr (kSums) {
        barriers.q.wait_full(single);
        const auto* const mixed = reinterpret_cast<const float*>(shared + opaque(Shape::kMixed));
        uint32_t of_k[4][4];
        mix_fragments(v, d_o, {numbers()->e, mixed}, {mixed + kChunk, numbers()->q}, of_k, a);
        wgmma_fence();
        add_outer<kWideKey>(state, of_k, keys);
        add_outer<kWideKey>(state, a, base + Shape::kQ);
        wgmma_commit();
      } else if constexpr (kOnline) {
        if constexpr (kImages) {
          barriers.e.wait_full(single);
        } else {
          scale_columns(v, numbers()->e);
        }
        if constexpr (!kImages || !kSave) pack_fragments(v, a);
        wgmma_fence();
        add_outer<kWideKey>(state, a, kImages ? anew(base + Shape::kE) : keys);
        wgmma_commit();
      }
      wgmma_wait<0>();
      keep(state);
      if constexpr (!kOnline || kSums) barriers.q.put_empty(single);
      if constexpr (kImages) barriers.e.put_empty(single);
      barriers.stages.put_empty(ring);
    }
    const ScanPlace place = own();
    store_state(args.d_initial_state, place, place.n, args.K, args.V, state);
  }
}

template <WideForm kForm, bool kSave>
void launch_reverse(const WideReverseArgs& all, void* stream) {
  const ScanReverseArgs& args = all.scan;
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.HV) * static_cast<unsigned>(wide_blocks(args.V, all.groups)), 1, 1};
  launch_overlapped(wide_reverse_kernel<kForm, kSave>, grid, kWideThreads, WideShape<false, kForm>::kShared, stream, all,
                    wide_maps(args.rows, args.d_o, args.shape, args.HV, args.K, args.V));
}
template <WideForm kForm>
void launch_reverse(const WideReverseArgs& all, void* stream) {
  all.scan.d_states != nullptr ? launch_reverse<kForm, true>(all, stream) : launch_reverse<kForm, false>(all, stream);
}

}  // namespace

void wide_reverse(const ScanReverseArgs& args, WideForm form, const WideImages& images, void* stream) {
  if ((args.d_states == nullptr) != (args.v == nullptr)) fail_internal("wide_reverse: d_states and v are saved together or not at all");
  if (args.K > kWideKey || args.parts != nullptr || args.made != nullptr) {
    fail_internal("wide_reverse: expected K at most {} and whole sequences, got K {}", kWideKey, args.K);
  }
  const WideReverseArgs all{args, images, wide_groups(args.sequences, args.HV, args.V)};
  switch (form) {
    case WideForm::kOffline:
      return launch_reverse<WideForm::kOffline>(all, stream);
    case WideForm::kRows:
      return launch_reverse<WideForm::kRows>(all, stream);
    case WideForm::kSums:
      return launch_reverse<WideForm::kSums>(all, stream);
    case WideForm::kKeys:
      return launch_reverse<WideForm::kKeys>(all, stream);
  }
}

}  // namespace fw::cuda
