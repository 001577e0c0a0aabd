// The forward scan of keys of 129 to 256 channels, from the raw rows of q and k and A and P of every chunk (tiles.h:
// RowScales), without chunk tiles. Per sequence and value head, chunk by chunk:
//   W = diag(z) v + diag(e) k S      U = A W      O = diag(q) q S + P U      S = gamma S + k^T diag(k) U          (additive rules: W = diag(z) v, U = W)
// Where streams are sums of q and k W has diag(erase_q) q S besides, and O diag(read_k) k S: both products come first,
// and are in registers together. A for itself is a product more than the chunk tiles of sm90/scan/forward.cu have, and
// spares [64, 256] numbers of a chunk that every block would load. Writes o (rows of each sequence only) and the final
// states, and for the gradients S^T at the start of every chunk and W of every chunk. Where channels decay each by its
// own, chunk tiles come one by one (tiles.h: QETiles). Then W = diag(z) v + E S, O = Q S + P U, S = Diag(gamma) S +
// Khat^T U. Products take bf16 operands and add in float32; S stays float32 throughout. What a group waits for is the
// other group's time on the tensor cores, so that W and O need not be under way, and in registers, together (but for
// sums).
//
// Roles, 384 threads, one block an SM (sm90/k256/parts.cuh), i the group; with chunk tiles k has the offsets kE and
// kKhat and the barriers e and khat:
//   warp     does                                              waits for                    says so to                  shared memory
//   0, 1     load k, numbers and v, then q, A, P of a chunk   {stages, q, a, p}.empty      {stages, q, a, p}.full      kK, kNumbers, kTile, kQ, kA, kP
//   2        thread 64 takes S^T away; with 3 bf16 rows of O   state[i].full, o[i].full     state[i].empty, o[i].empty  kState, kO
//   3        thread 96 takes W away; with 2 bf16 rows of O     left[i].full, o[i].full      stages.empty, o[i].empty    kTile, kO
//   4 to 7,  the state of a group's value block in registers:  {stages, q, a, p}.full,      {stages, q, a, p}.empty,    read those, write kTile, kO, kState
//   8 to 11  W, U, O, S of a chunk                             {o, state}[i].empty          {left, o, state}[i].full

#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/scan/outputs.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/k256/parts.cuh"

namespace fw::cuda {
namespace {

struct K256ForwardArgs {
  ScanForwardArgs scan;
  K256Tiles chunk_tiles;
  int groups;
};

template <class Shape>
__global__ void __launch_bounds__(kK256Threads, 1)
    k256_forward_kernel(const __grid_constant__ K256ForwardArgs all, const __grid_constant__ StageMaps maps) {
  constexpr bool kOut = Shape::kOut, kSave = Shape::kSave, kDelta = Shape::kDelta, kSums = Shape::kSums,
                 kChunkTiles = Shape::kChunkTiles;
  using Registers = K256Registers<56, 224>;
  const ScanForwardArgs& args = all.scan;
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
    if (thread_index() < kStoreThread) {
      const K256StageArgs stage_args{args.sequences, args.rows, args.v, all.chunk_tiles,
                                     args.z,         args.HV,   args.K, args.V};
      const auto in_order = [](int i) { return i; };
      if constexpr (kChunkTiles) {
        load_k256_tiles<Shape>(stage_args, maps, coord, shared, barriers, in_order);
      } else {
        load_k256_chunks<Shape>(stage_args, maps, coord, shared, barriers, in_order);
      }
      return;
    }
    Ring<Shape::kStages> ring;
    Ring<1> single;
    FW_NO_UNROLL
    for (int c = 0; c < coord.scan.chunks; ++c, ring.next(), single.next()) {
      FW_NO_UNROLL
      for (int group = 0; group < coord.groups; ++group) {
        if constexpr (kSave)
          drain_k256<Shape>(coord, group, args.HV, c, ring, single, shared, barriers, args.states, args.w);
        if (kOut && args.o.bf16 != 0) {
          barriers.o[group].wait_full(single);
          store_bf16_rows(tile_rows(args.o, args.sequences, coord.of_group(group), args.V), c,
                          shared + Shape::kO + group * kSw128Bytes, static_cast<int>(thread_index() - kStoreThread));
          barriers.o[group].put_empty(single);
        }
      }
    }
    if (kSave && thread_index() % 32 == 0) bulk_wait<0>();
  } else {
    register_count_increase<Registers::kOfState>();
    const int group = shuffle(static_cast<int>(thread_index() - kStateThread) / kStateThreads, 0);
    const auto own = [&] { return find_k256_group(args.sequences, args.HV, args.V, all.groups, group); };
    if (const K256Coord coord = k256_coord(args.sequences, args.HV, args.V, all.groups); group >= coord.groups) return;
    float state[kMaxTileK / 2];
    {
      const ScanCoord coord = own();
      load_state(args.initial_state, coord, coord.n, args.K, args.V, state);
    }
    const int chunks = own().chunks;
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    const uint32_t numbers_of_state = base + Shape::kState + static_cast<uint32_t>(group * Shape::kMatrix);
    FW_NO_UNROLL
    for (int c = 0; c < chunks; ++c) {
      const auto ring = Shape::stage_of(c);
      const auto single = Shape::single_of(c);
      using Numbers = std::conditional_t<kChunkTiles, K256Decays, RowScales>;
      const auto numbers = [&] {
        return reinterpret_cast<const Numbers*>(shared + opaque(Shape::kNumbers + ring.slot * Shape::kNumberBytes));
      };
      // Of chunk tiles, which have one buffer: made anew each time, or descriptors of all of them are kept in
      // registers.
      const auto anew = [&](uint32_t address) {
        return kChunkTiles ? static_cast<uint32_t>(opaque(static_cast<int>(address))) : address;
      };
      const uint32_t keys =
          kChunkTiles ? anew(base + Shape::kE) : base + Shape::kK + static_cast<uint32_t>(ring.slot * Shape::kMatrix);
      const uint32_t tile = base + static_cast<uint32_t>(Shape::tile(ring.slot, group));
      barriers.stages.wait_full(ring);
      if constexpr (kSave) barriers.state[group].wait_empty(single);
      put_k256_state<Shape>(state, numbers_of_state, numbers()->gamma, group);
      if constexpr (kSave) barriers.state[group].put_full(single);
      uint32_t b[4][4];
      [[maybe_unused]] uint32_t scaled[4][4];  // not kChunkTiles
      float o[32];
      [[maybe_unused]] float w[32];  // kDelta
      if constexpr (kDelta) {
        if constexpr (kChunkTiles) barriers.e.wait_full(single);
        wgmma_fence();
        multiply_state(w, numbers_of_state, keys);
        wgmma_commit();
        // while the product runs, which does not touch it
        if constexpr (kChunkTiles) scale_columns(state, numbers()->gamma);
        if constexpr (kSums) {
          barriers.q.wait_full(single);
          wgmma_fence();
          multiply_state(o, static_cast<uint32_t>(opaque(static_cast<int>(numbers_of_state))), base + Shape::kQ);
          wgmma_commit();
          wgmma_wait<0>();
          keep(w);
          keep(o);
          const auto* const mixed = reinterpret_cast<const float*>(shared + opaque(Shape::kMixed));
          mix_products(w, o, {numbers()->e, mixed}, {mixed + kChunk, numbers()->q}, numbers()->z_scale, tile);
          barriers.q.put_empty(single);
        } else {
          FW_UNROLL
          for (int k = 0; k < 4; ++k) load_token_fragment(b[k], tile, k);
          wgmma_wait<0>();
          keep(w);
          if constexpr (kChunkTiles) {
            barriers.e.put_empty(single);
          } else {
            scale_columns(w, numbers()->e);
          }
          add_fragments(w, b, numbers()->z_scale);
          pack_fragments(w, b);
        }
      } else {
        FW_UNROLL
        for (int k = 0; k < 4; ++k) load_token_fragment(b[k], tile, k);
        scale_fragments(b, numbers()->z_scale, b);
      }
      if constexpr (kSave && !kSums) {
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_token_fragment(tile, k, b[k]);
      }
      if constexpr (kSave || kSums) fence_async_shared();
      if constexpr (kSave) barriers.left[group].put_full(ring);
      if constexpr (kSums) {
        named_barrier_sync(1 + group, kStateThreads);  // the product reads what all four warps have left of W
        barriers.a.wait_full(single);
        wgmma_fence();
        // in the registers of k S: with others ptxas has no registers for all three
        multiply_tile(w, tile, base + Shape::kA);
        wgmma_commit();
        wgmma_wait<0>();
        keep(w);
        barriers.a.put_empty(single);
        pack_fragments(w, b);
      } else if constexpr (kDelta) {
        float u[32];
        barriers.a.wait_full(single);
        wgmma_fence();
        multiply_rows(u, b, anew(base + Shape::kA), false);
        wgmma_commit();
        wgmma_wait<0>();
        keep(u);
        barriers.a.put_empty(single);
        pack_fragments(u, b);
      }
      if constexpr (kOut) {
        if constexpr (!kSums) {
          barriers.q.wait_full(single);
          wgmma_fence();
          // Descriptors are made anew, not kept from W's product: registers.
          multiply_state(o, static_cast<uint32_t>(opaque(static_cast<int>(numbers_of_state))), base + Shape::kQ);
          wgmma_commit();
          wgmma_wait<0>();
          keep(o);
          barriers.q.put_empty(single);
          if constexpr (!kChunkTiles) scale_columns(o, numbers()->q);
        }
        barriers.p.wait_full(single);
        wgmma_fence();
        multiply_rows(o, b, anew(base + Shape::kP), true);
        wgmma_commit();
      }
      if constexpr (kChunkTiles) {
        barriers.khat.wait_full(single);
        wgmma_fence();
        add_outer<kMaxTileK>(state, b, anew(base + Shape::kKhat));
      } else {
        scale_fragments(b, numbers()->k, scaled);
        wgmma_fence();
        add_outer<kMaxTileK>(state, scaled, keys);
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(state);
      if constexpr (kChunkTiles) barriers.khat.put_empty(single);
      if constexpr (kOut) {
        keep(o);
        barriers.p.put_empty(single);
      }
      barriers.stages.put_empty(ring);
      if (kOut && args.checkpoints.states.data != nullptr) [[unlikely]] {  // without o the call is not the caller's
        const ScanCoord coord = own();
        CheckpointWalk walk(args.checkpoints, args.sequences, coord);
        if ((walk.first + c + 1) % args.checkpoints.chunks == 0) {
          store_state(args.checkpoints.states, coord, walk.next(args.checkpoints, coord, c), args.K, args.V, state);
        }
      }
      if constexpr (kOut) {
        if (args.o.bf16 == 0) {
          store_float_rows(tile_rows(args.o, args.sequences, own(), args.V), c, o);
        } else {
          pack_fragments(o, b);
          barriers.o[group].wait_empty(single);
          FW_UNROLL
          for (int k = 0; k < 4; ++k)
            store_token_fragment(base + Shape::kO + static_cast<uint32_t>(group * kSw128Bytes), k, b[k]);
          barriers.o[group].put_full(single);
        }
      }
    }
    const ScanCoord coord = own();
    store_state(args.final_state, coord, coord.n, args.K, args.V, state);
  }
}

template <K256Form kForm>
void launch_forward(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  const K256ForwardArgs all{args, chunk_tiles, k256_groups(args.sequences, args.HV, args.V)};
  with_constants(
      [&](auto writes_o, auto saves) {
        using Shape = K256Shape<K256Traits{
            .form = kForm, .direction = Direction::kForward, .writes_o = writes_o, .saves = saves}>;
        launch_overlapped(k256_forward_kernel<Shape>,
                          scan_grid(args.sequences, args.HV, k256_blocks(args.V, all.groups)), kK256Threads,
                          Shape::kShared, stream, all,
                          k256_maps(args.rows, args.v, args.shape, args.HV, args.K, args.V));
      },
      args.o.data != nullptr, args.states != nullptr);
}

}  // namespace

void k256_forward_rows(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  args.is_delta ? launch_forward<K256Form::kRows>(args, chunk_tiles, stream)
                : launch_forward<K256Form::kAdditive>(args, chunk_tiles, stream);
}
void k256_forward_sums(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_forward<K256Form::kSums>(args, chunk_tiles, stream);
}
void k256_forward_keys(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_forward<K256Form::kKeys>(args, chunk_tiles, stream);
}

}  // namespace fw::cuda
