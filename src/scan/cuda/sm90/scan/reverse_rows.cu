// The reverse scan with A and P. Per sequence and value head, with raw d_o [tokens, HV, V]:
// Source::kRows, kSums: of rules whose w is raw rows of k times a scale per row (reverse_takes_rows(), rule_traits.h).
// e and r are such rows of k and q or (kSums) sums of both. They are taken from those rows, without chunk tiles, with
// the numbers of tiles.h (RowScalesBwd):
//   dR = P^T dO + diag(k) K D      dZ = A^T dR
//   D = gamma D + Q^T (diag(q) dO + diag(erase_q) dZ) + K^T (diag(read_k) dO + diag(e) dZ)
// Source::kKeys: of rules with a decay a channel (stores_k_hat()), from QETiles and Khat:
//   dR = P^T dO + Khat D      dZ = A^T dR      D = Diag(gamma) D + Q^T dO + E^T dZ
// Writes, if asked for, D^T at the end of every chunk (before the step) and dZ of every chunk for the gradients, and
// the gradient of the initial state. Products take bf16 operands and add in float32; D stays float32 throughout. The
// order of work is sm90/scan/forward.cu's.
//
// Roles, 256 threads, one block an SM (sm90/scan/parts.cuh):
//   warp     does                                              waits for                    says so to                shared memory
//   0, 1     load k, q (kKeys: and E), A, P, d_o and numbers  stages.empty                 stages.full               stages: kE, kQ, kK, kA, kP, kTile,
//            of a chunk; thread 0 asks for chunk tiles, A, P and                                                           kNumbers
//            numbers, 32 for rows
//   2        thread 64 takes D^T away                          d.full                       d.empty                   kD
//   3        thread 96 takes dZ away                           z.full                       z.empty                   kZ
//   4 to 7   the state's gradient in registers: dR, dZ, D      stages.full, {d, z}.empty    stages.empty, {d, z}.full read stages, write kD, kZ
// Where the gradients run alongside (ScanReverseArgs::made) threads 64 and 96 count what is in memory.
#include <algorithm>
#include <cstddef>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/scan/reverse_parts.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

namespace {

enum class Source { kRows, kSums, kKeys };

// Bytes of shared memory.
template <int kTileK, bool kSave, Source kSource>
struct ReverseRowsShape {
  static constexpr bool kKeys = kSource == Source::kKeys;
  // kKeys: gamma.
  static constexpr int kNumberBytes = kKeys                      ? kTileK * 4
                                      : kSource == Source::kSums ? sizeof(RowScalesBwd)
                                                                 : kPlainScaleBytes;
  static constexpr int kMatrix = 64 * kTileK * 2;
  static constexpr int kE = 0, kQ = kMatrix, kK = kKeys ? 2 * kMatrix : kE, kA = kKeys ? 3 * kMatrix : 2 * kMatrix,
                       kP = kA + kSw128Bytes, kTile = kP + kSw128Bytes, kNumbers = kTile + kSw128Bytes;
  static constexpr int kStage = round_to_sw128(kNumbers + kNumberBytes);
  static constexpr int kBuffers = 2;  // of each thing that leaves
  static constexpr int kOutputs = kSave ? kBuffers * (kMatrix + kSw128Bytes) : 0;
  static constexpr int kStages = std::min(4, (kMaxSharedBytes - kScanBarrierBytes - kOutputs) / kStage);
  static constexpr int kD = kStages * kStage, kZ = kD + kBuffers * kMatrix, kBarriers = kStages * kStage + kOutputs,
                       kShared = kBarriers + kScanBarrierBytes;

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kBuffers> d, z;
  };
  static_assert(kStages >= (kKeys ? 2 : 3) && sizeof(Barriers) <= kScanBarrierBytes &&
                sizeof(IntraChunk) == 2 * kSw128Bytes && offsetof(IntraChunk, p) == kSw128Bytes);
};

template <int kTileK, bool kSave, Source kSource>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_reverse_rows_kernel(const ScanReverseArgs args, const __grid_constant__ StageMaps maps) {
  using Shape = ReverseRowsShape<kTileK, kSave, kSource>;
  constexpr bool kMixed = kSource == Source::kSums, kKeys = Shape::kKeys;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.stages.init(1 + static_cast<int>(kStoreThread), kStateThreads);
    barriers.d.init(kStateThreads, 1);
    barriers.z.init(kStateThreads, 1);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const int value_blocks = (args.V + kValueBlock - 1) / kValueBlock;
  const ScanCoord coord = scan_coord(args.sequences, args.HV, value_blocks, 0);
  const int chunks = reverse_chunks<kSave>(args, coord, shared);
  if (chunks < 0) return;

  if (thread_index() < kStoreThread) {
    const TileRows d_o = tile_rows(args.d_o, args.sequences, coord, args.V);
    const TmaCoord tma(args.sequences, coord);
    const int d_o_head = coord.hv / args.d_o.divisor, q_head = coord.hv / args.rows.q.divisor,
              k_head = coord.hv / args.rows.k.divisor;
    constexpr int kRowSw128Tiles = kTileK / 64;
    Ring<Shape::kStages> ring;
    for (int c = chunks - 1; c >= 0; --c, ring.next()) {
      char* const stage = shared + ring.slot * Shape::kStage;
      uint64_t* const full = barriers.stages.full + ring.slot;
      const int64_t tile = coord.first_tile + static_cast<int64_t>(c) * args.HV;
      barriers.stages.wait_empty(ring);
      const bool whole = tma.takes(c), loads_d_o = whole && maps.values != 0,
                 loads_rows = kKeys || (whole && maps.rows != 0);
      if (thread_index() == 0) {
        mbarrier_expect(full, static_cast<uint32_t>(sizeof(IntraChunk)) + Shape::kNumberBytes +
                                  (loads_d_o ? kTensorBytes : 0) +
                                  (kKeys        ? 3 * Shape::kMatrix
                                   : loads_rows ? 2 * kRowSw128Tiles * kTensorBytes
                                                : 0));
        bulk_load(stage + Shape::kA, args.pairs + tile, sizeof(IntraChunk), full);
        if constexpr (kKeys) {
          const auto* const chunk_tile = static_cast<const QETiles<kTileK>*>(args.chunk_tiles) + tile;
          bulk_load(stage + Shape::kK, args.keys + tile * (64 * kTileK), Shape::kMatrix, full);
          bulk_load(stage + Shape::kE, chunk_tile->e, 2 * Shape::kMatrix, full);
          bulk_load(stage + Shape::kNumbers, chunk_tile->gamma, Shape::kNumberBytes, full);
        } else {
          bulk_load(stage + Shape::kNumbers, args.numbers + tile, Shape::kNumberBytes, full);
        }
      } else if (thread_index() == 32) {
        FW_UNROLL
        for (int sw128 = 0; sw128 < kRowSw128Tiles; ++sw128) {
          if (kKeys || !loads_rows) break;
          tma.bring(maps.k, 64 * sw128, k_head, c, stage + Shape::kK + sw128 * kSw128Bytes, full);
          tma.bring(maps.q, 64 * sw128, q_head, c, stage + Shape::kQ + sw128 * kSw128Bytes, full);
        }
        if (loads_d_o) tma.bring(maps.v, coord.value_block * kValueBlock, d_o_head, c, stage + Shape::kTile, full);
      }
      if (!loads_rows || !loads_d_o) {
        if (!loads_rows) {
          fill_rows<kTileK>(args.rows.k, args.sequences, coord, c, args.K, stage + Shape::kK);
          fill_rows<kTileK>(args.rows.q, args.sequences, coord, c, args.K, stage + Shape::kQ);
        }
        if (!loads_d_o) fill_tile(d_o, c, stage + Shape::kTile);
        cp_async_commit();
        cp_async_wait<0>();
        fence_async_shared();  // for the products, and for TMA, which writes there next
      }
      mbarrier_arrive(full);
    }
  } else if (thread_index() < kStateThread) {
    drain_reverse<kSave, Shape::kMatrix>(args, coord, value_blocks, shared + Shape::kD, barriers.d, shared + Shape::kZ,
                                         barriers.z);
  } else {
    float state[kTileK / 2];
    load_state(args.d_final_state, coord, coord.n, args.K, args.V, state);
    Ring<Shape::kStages> ring;
    Ring<Shape::kBuffers> leaving;
    uint32_t a[kTileK / 16][4];
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    const auto numbers = [&] {
      return reinterpret_cast<const RowScalesBwd*>(shared + ring.slot * Shape::kStage + Shape::kNumbers);
    };
    const auto decay_state = [&] {
      if constexpr (kKeys) {
        scale_columns(state, reinterpret_cast<const float*>(numbers()));
      } else {
        const float gamma = numbers()->gamma[0];
        FW_UNROLL
        for (float& x : state) x *= gamma;
      }
    };
    pack_fragments(state, a);
    if (chunks > 0) {
      barriers.stages.wait_full(ring);
      decay_state();
    }
    FW_NO_UNROLL
    for (int left = chunks; left > 0; --left) {
      // Here a stage is full, a = D and state = gamma D.
      const uint32_t stage = base + ring.slot * Shape::kStage;
      uint32_t d_o[4][4], b[4][4];
      [[maybe_unused]] uint32_t scaled[4][4];  // not kKeys
      float v[32], r[32], z[32];
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], stage + Shape::kTile, k);
      wgmma_fence();
      multiply_rows(v, a, stage + Shape::kK, false);
      multiply_outer(r, d_o, stage + Shape::kP);
      wgmma_commit();
      if constexpr (kKeys) {
        add_outer<kTileK>(state, d_o, stage + Shape::kQ);
        wgmma_commit();
      } else if constexpr (!kMixed) {
        scale_fragments(d_o, numbers()->q, scaled);
        wgmma_fence();
        add_outer<kTileK>(state, scaled, stage + Shape::kQ);
        wgmma_commit();
      }
      if constexpr (kSave) {
        barriers.d.wait_empty(leaving);
        const uint32_t to = base + Shape::kD + leaving.slot * Shape::kMatrix;
        FW_UNROLL
        for (int k = 0; k < kTileK / 16; ++k) store_state_fragment(to, k, a[k]);
        fence_async_shared();
        barriers.d.put_full(leaving);
      }
      wgmma_wait<kMixed ? 0 : 1>();
      keep(v);
      keep(r);
      if constexpr (!kKeys) scale_columns(v, numbers()->k);
      FW_UNROLL
      for (int i = 0; i < 32; ++i) v[i] += r[i];
      pack_fragments(v, b);
      wgmma_fence();
      multiply_outer(z, b, stage + Shape::kA);
      wgmma_commit();
      wgmma_wait<0>();
      keep(z);
      keep(state);
      if constexpr (kSave || kKeys) pack_fragments(z, b);
      if constexpr (kSave) {
        barriers.z.wait_empty(leaving);
        const uint32_t to = base + Shape::kZ + leaving.slot * kSw128Bytes;
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_token_fragment(to, k, b[k]);
        fence_async_shared();
        barriers.z.put_full(leaving);
        leaving.next();
      }
      if constexpr (kMixed) {
        FW_UNROLL
        for (int i = 0; i < 32; ++i) v[i] = z[i];
        scale_columns(v, numbers()->erase_q);
        add_fragments(v, d_o, numbers()->q);
        pack_fragments(v, b);
      }
      if constexpr (kKeys) {
        wgmma_fence();
        add_outer<kTileK>(state, b, stage + Shape::kE);
      } else {
        scale_columns(z, numbers()->e);
        if constexpr (kMixed) add_fragments(z, d_o, numbers()->read_k);
        pack_fragments(z, scaled);
        wgmma_fence();
        if constexpr (kMixed) add_outer<kTileK>(state, b, stage + Shape::kQ);
        add_outer<kTileK>(state, scaled, stage + Shape::kE);
      }
      wgmma_commit();
      const Ring<Shape::kStages> done = ring;
      ring.next();
      if (left > 1) barriers.stages.wait_full(ring);
      wgmma_wait<0>();
      keep(state);
      barriers.stages.put_empty(done);
      pack_fragments(state, a);
      if (left > 1) decay_state();
    }
    store_state(args.d_initial_state, coord, args.final_index != nullptr ? args.final_index[coord.n] : coord.n, args.K,
                args.V, state);
  }
}

template <int kTileK, bool kSave, Source kSource>
void launch_reverse_rows(const ScanReverseArgs& args, void* stream) {
  using Shape = ReverseRowsShape<kTileK, kSave, kSource>;
  const unsigned blocks = static_cast<unsigned>((args.V + kValueBlock - 1) / kValueBlock);
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.HV) * blocks, 1, 1};
  StageMaps stage;
  stage.values = map_tensor(args.d_o, args.shape, args.HV, args.V, stage.v) ? 1 : 0;
  const ScanRows& rows = args.rows;
  stage.rows = !Shape::kKeys && map_tensor(rows.k, args.shape, args.HV, args.K, stage.k) &&
                       map_tensor(rows.q, args.shape, args.HV, args.K, stage.q)
                   ? 1
                   : 0;
  launch_overlapped(scan_reverse_rows_kernel<kTileK, kSave, kSource>, grid, kScanThreads, Shape::kShared, stream, args,
                    stage);
}
template <int kTileK, bool kSave>
void launch_reverse_rows(const ScanReverseArgs& args, ReverseScan kernel, void* stream) {
  if (kernel == ReverseScan::kKeys) return launch_reverse_rows<kTileK, kSave, Source::kKeys>(args, stream);
  args.mixed ? launch_reverse_rows<kTileK, kSave, Source::kSums>(args, stream)
             : launch_reverse_rows<kTileK, kSave, Source::kRows>(args, stream);
}
template <int kTileK>
void launch_reverse_rows(const ScanReverseArgs& args, ReverseScan kernel, void* stream) {
  args.d_states != nullptr ? launch_reverse_rows<kTileK, true>(args, kernel, stream)
                           : launch_reverse_rows<kTileK, false>(args, kernel, stream);
}

}  // namespace

void scan_reverse_rows(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream) {
  k_tile == 64 ? launch_reverse_rows<64>(args, kernel, stream) : launch_reverse_rows<128>(args, kernel, stream);
}

}  // namespace fw::cuda
