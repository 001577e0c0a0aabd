// The reverse scan of keys of 129 to 256 channels, from the raw rows of q and k and A and P of every chunk (tiles.h:
// RowScales). Per sequence and value head, from the last chunk on, with D the gradient of the state:
//   dR = P^T dO + diag(k) k D      dZ = A^T dR      D = gamma D + q^T diag(q) dO + k^T diag(e) dZ          (additive rules: V = diag(k) k D, and D without dZ)
// Where streams are sums of q and k: D = gamma D + q^T (diag(q) dO + diag(erase_q) dZ) + k^T (diag(read_k) dO + diag(e)
// dZ); then q is the last that is wanted. Where channels decay each by its own dR = P^T dO + Khat D, D = Diag(gamma) D
// + Q^T dO + E^T dZ of chunk tiles (tiles.h: QETiles), which come one by one. Writes, if asked for, D^T at the end of
// every chunk (before the step) and dZ (V) of every chunk for the gradients, and the gradient of the initial state.
// Products take bf16 operands and add in float32; D stays float32 throughout.
//
// Roles, 384 threads, one block an SM (sm90/k256/parts.cuh), i the group; with chunk tiles k has the offsets kE and
// kKhat and the barriers e and khat:
//   warp     does                                               waits for                    says so to                  shared memory
//   0, 1     load k, numbers and d_o, then q, A, P of a chunk  {stages, q, a, p}.empty      {stages, q, a, p}.full      kK, kNumbers, kTile, kQ, kA, kP
//   2        thread 64 takes D^T away                           state[i].full                state[i].empty              kState
//   3        thread 96 takes dZ (V) away                        left[i].full                 stages.empty                kTile
//   4 to 7,  the gradient of the state of a group's value       {stages, q, a, p}.full,      {stages, q, a, p}.empty,    read those, write kTile, kState
//   8 to 11  block in registers: dR, dZ, D                      state[i].empty               {left, state}[i].full
#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/k256/parts.cuh"

namespace fw::cuda {
namespace {

struct K256ReverseArgs {
  ScanReverseArgs scan;
  K256Tiles chunk_tiles;
  int groups;
};

template <class Shape>
__global__ void __launch_bounds__(kK256Threads, 1)
    k256_reverse_kernel(const __grid_constant__ K256ReverseArgs all, const __grid_constant__ StageMaps maps) {
  constexpr bool kSave = Shape::kSave, kDelta = Shape::kDelta, kSums = Shape::kSums, kChunkTiles = Shape::kChunkTiles;
  using Registers = K256Registers<56, 224>;
  const ScanReverseArgs& args = all.scan;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0)
    init_k256_barriers<Shape>(barriers, k256_coord(args.sequences, args.HV, args.V, all.groups).groups);
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();

  if (thread_index() < kStateThread) {
    register_count_decrease<Registers::kOfMovers>();
    const K256Coord coord = k256_coord(args.sequences, args.HV, args.V, all.groups);
    const int last = coord.scan.chunks - 1;
    if (thread_index() < kStoreThread) {
      const K256StageArgs stage_args{args.sequences, args.rows, args.d_o, all.chunk_tiles,
                                     nullptr,        args.HV,   args.K,   args.V};
      const auto from_the_last = [last](int i) { return last - i; };
      if constexpr (kChunkTiles) {
        load_k256_tiles<Shape>(stage_args, maps, coord, shared, barriers, from_the_last);
      } else {
        load_k256_chunks<Shape>(stage_args, maps, coord, shared, barriers, from_the_last);
      }
      return;
    }
    if (!kSave || thread_index() % 32 != 0) return;
    Ring<Shape::kStages> ring;
    Ring<1> single;
    FW_NO_UNROLL
    for (int c = last; c >= 0; --c, ring.next(), single.next()) {
      FW_NO_UNROLL
      for (int group = 0; group < coord.groups; ++group)
        drain_k256<Shape>(coord, group, args.HV, c, ring, single, shared, barriers, args.d_states, args.v);
    }
    bulk_wait<0>();
  } else {
    register_count_increase<Registers::kOfState>();
    const int group = shuffle(static_cast<int>(thread_index() - kStateThread) / kStateThreads, 0);
    const auto own = [&] { return find_k256_group(args.sequences, args.HV, args.V, all.groups, group); };
    if (const K256Coord coord = k256_coord(args.sequences, args.HV, args.V, all.groups); group >= coord.groups) return;
    float state[kMaxTileK / 2];
    {
      const ScanCoord coord = own();
      load_state(args.d_final_state, coord, coord.n, args.K, args.V, state);
    }
    const int chunks = own().chunks;
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    const uint32_t numbers_of_state = base + Shape::kState + static_cast<uint32_t>(group * Shape::kMatrix);
    FW_NO_UNROLL
    for (int i = 0; i < chunks; ++i) {
      const auto ring = Shape::stage_of(i);
      const auto single = Shape::single_of(i);
      using Numbers = std::conditional_t<kChunkTiles, K256Decays, RowScales>;
      const auto numbers = [&] {
        return reinterpret_cast<const Numbers*>(shared + opaque(Shape::kNumbers + ring.slot * Shape::kNumberBytes));
      };
      // Of chunk tiles, which have one buffer: made anew each time, or descriptors of all of them are kept in
      // registers.
      const auto anew = [&](uint32_t address) {
        return kChunkTiles ? static_cast<uint32_t>(opaque(static_cast<int>(address))) : address;
      };
      const uint32_t keys = kChunkTiles ? anew(base + Shape::kKhat)
                                        : base + Shape::kK + static_cast<uint32_t>(ring.slot * Shape::kMatrix);
      const uint32_t tile = base + static_cast<uint32_t>(Shape::tile(ring.slot, group));
      constexpr bool kReads = kDelta || kSave;  // D
      barriers.stages.wait_full(ring);
      if constexpr (kSave) barriers.state[group].wait_empty(single);
      put_k256_state<Shape>(state, numbers_of_state, numbers()->gamma, group);
      if constexpr (kSave) barriers.state[group].put_full(single);
      uint32_t d_o[4][4], a[4][4];
      float v[32];
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], tile, k);
      if constexpr (kChunkTiles) barriers.khat.wait_full(single);
      wgmma_fence();
      if constexpr (kReads) {
        multiply_state(v, numbers_of_state, keys);
        wgmma_commit();
        // while the product runs, which does not touch it
        if constexpr (kChunkTiles) scale_columns(state, numbers()->gamma);
      }
      if constexpr (!kSums) {
        if constexpr (!kChunkTiles) scale_fragments(d_o, numbers()->q, a);
        barriers.q.wait_full(single);
        wgmma_fence();
        add_outer<kMaxTileK>(state, kChunkTiles ? d_o : a, anew(base + Shape::kQ));
        wgmma_commit();
      }
      if constexpr (kReads) {
        wgmma_wait<kSums ? 0 : 1>();
        keep(v);
        if constexpr (kChunkTiles) {
          barriers.khat.put_empty(single);
        } else {
          scale_columns(v, numbers()->k);
        }
      }
      if constexpr (kDelta) {
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
        add_outer<kMaxTileK>(state, of_k, keys);
        add_outer<kMaxTileK>(state, a, base + Shape::kQ);
        wgmma_commit();
      } else if constexpr (kDelta) {
        if constexpr (kChunkTiles) {
          barriers.e.wait_full(single);
        } else {
          scale_columns(v, numbers()->e);
        }
        if constexpr (!kChunkTiles || !kSave) pack_fragments(v, a);
        wgmma_fence();
        add_outer<kMaxTileK>(state, a, kChunkTiles ? anew(base + Shape::kE) : keys);
        wgmma_commit();
      }
      wgmma_wait<0>();
      keep(state);
      if constexpr (!kDelta || kSums) barriers.q.put_empty(single);
      if constexpr (kChunkTiles) barriers.e.put_empty(single);
      barriers.stages.put_empty(ring);
    }
    const ScanCoord coord = own();
    store_state(args.d_initial_state, coord, coord.n, args.K, args.V, state);
  }
}

template <K256Form kForm>
void launch_reverse(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  const K256ReverseArgs all{args, chunk_tiles, k256_groups(args.sequences, args.HV, args.V)};
  with_constants(
      [&](auto saves) {
        using Shape =
            K256Shape<K256Traits{.form = kForm, .direction = Direction::kReverse, .writes_o = false, .saves = saves}>;
        launch_overlapped(k256_reverse_kernel<Shape>,
                          scan_grid(args.sequences, args.HV, k256_blocks(args.V, all.groups)), kK256Threads,
                          Shape::kShared, stream, all,
                          k256_maps(args.rows, args.d_o, args.shape, args.HV, args.K, args.V));
      },
      args.d_states != nullptr);
}

}  // namespace

void k256_reverse_rows(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  args.is_delta ? launch_reverse<K256Form::kRows>(args, chunk_tiles, stream)
                : launch_reverse<K256Form::kAdditive>(args, chunk_tiles, stream);
}
void k256_reverse_sums(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_reverse<K256Form::kSums>(args, chunk_tiles, stream);
}
void k256_reverse_keys(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_reverse<K256Form::kKeys>(args, chunk_tiles, stream);
}

}  // namespace fw::cuda
