// The reverse scan over chunks of 64 tokens: D, the gradient of the state, from each sequence's end to its start
// (recurrence.md 5, in the form of tiles.h). Per sequence and value head, with BwdTiles made by prepare() and raw d_o
// [tokens, HV, V]:
//   V = k D      D = Diag(gamma) D + q^T dO - y^T V          (additive rules: without the last product)
// Writes, if asked for, D^T at the end of every chunk (before the step) and V of every chunk for the gradients, and the
// gradient of the initial state. Products take bf16 operands and add in float32; D stays float32 throughout. The order
// of work is scan/cuda/sm90/scan/forward.cu's. Where reverse_takes_rows() or stores_k_hat() sm90/scan/reverse_rows.cu
// runs instead.
// kHiLo: of rules with uses_hi_lo() (rule_traits.h): V = diag(scale) k D, and D, V, k and y are sums of two bf16 values
// there and in y^T V.
//
// Roles, 256 threads, one block an SM (sm90/scan/parts.cuh):
//   warp     does                                              waits for                    says so to                shared memory
//   0, 1     load chunk tiles and d_o of a chunk; thread 0 asks    stages.empty                 stages.full               stages: kK, kY, kQ, kGamma, kTile
//            for chunk tiles, 32 for d_o
//   2        thread 64 takes D^T away                          d.full                       d.empty                   kD
//   3        thread 96 takes V away                            v.full                       v.empty                   kV
//   4 to 7   the state's gradient in registers: V and D        stages.full, {d, v}.empty    stages.empty, {d, v}.full read stages, write kD, kV
// Where the gradients run alongside (ScanReverseArgs::made) threads 64 and 96 count what is in memory.
#include <algorithm>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/scan/reverse_parts.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

namespace {

// The parts of an chunk tile that this kernel reads, then the dO tile, in shared memory: bytes.
template <int kTileK, bool kDelta, bool kSave, bool kHiLo>
struct ReverseShape {
  using ChunkTile = BwdTiles<kTileK>;
  static constexpr int kMatrix = 64 * kTileK * 2;
  static constexpr int kK = 0, kY = kK + kMatrix, kQ = kY + (kDelta ? kMatrix : 0), kGamma = kQ + kMatrix,
                       kChunkTile = kGamma + kTileK * 4, kTile = round_to_sw128(kChunkTile);
  static constexpr int kLo = kTile + kSw128Bytes, kKeysLo = kLo + kMatrix, kStage = kHiLo ? kKeysLo + kMatrix : kLo;
  static constexpr int kBuffers = 2;  // of each thing that leaves
  static constexpr int kOutputs = kSave ? kBuffers * (kMatrix + kSw128Bytes) : 0;
  static constexpr int kStages = std::min(4, (kMaxSharedBytes - kOutputs) / kStage);
  static constexpr int kD = kStages * kStage, kV = kD + kBuffers * kMatrix;
  static constexpr int kBarriers = kChunkTile + (kHiLo ? 64 * 4 : 0), kShared = kStages * kStage + kOutputs;

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kBuffers> d, v;
  };
  static_assert(kStages >= (kHiLo ? 2 : 3) && kShared <= kMaxSharedBytes && kTile - kBarriers >= kScanBarrierBytes &&
                (kDelta || !kHiLo) && sizeof(Barriers) <= kScanBarrierBytes);
  static_assert(sizeof(ChunkTile) == 3 * kMatrix + kTileK * 4);
};

template <int kTileK, bool kDelta, bool kSave, bool kHiLo>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_reverse_kernel(const ScanReverseArgs args, const __grid_constant__ StageMaps maps) {
  using Shape = ReverseShape<kTileK, kDelta, kSave, kHiLo>;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  if (thread_index() == 0) {
    barriers.stages.init(1 + static_cast<int>(kStoreThread), kStateThreads);
    barriers.d.init(kStateThreads, 1);
    barriers.v.init(kStateThreads, 1);
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
    const auto* const chunk_tiles = static_cast<const typename Shape::ChunkTile*>(args.chunk_tiles) + coord.first_tile;
    const TileRows d_o = tile_rows(args.d_o, args.sequences, coord, args.V);
    const TmaCoord tma(args.sequences, coord);
    const int head = coord.hv / args.d_o.divisor;
    Ring<Shape::kStages> ring;
    for (int c = chunks - 1; c >= 0; --c, ring.next()) {
      char* const stage = shared + ring.slot * Shape::kStage;
      uint64_t* const full = barriers.stages.full + ring.slot;
      barriers.stages.wait_empty(ring);
      const bool loads_d_o = maps.values != 0 && tma.takes(c);
      if (thread_index() == 0) {
        const auto* const chunk_tile = chunk_tiles + static_cast<int64_t>(c) * args.HV;
        mbarrier_expect(
            full, Shape::kChunkTile + (loads_d_o ? kTensorBytes : 0) + (kHiLo ? lo_bytes<kTileK>(args.hi_lo) : 0));
        if constexpr (kHiLo)
          issue_lo_tiles<Shape, kTileK>(args.hi_lo, coord.first_tile + static_cast<int64_t>(c) * args.HV, stage, full);
        if constexpr (kDelta) {
          bulk_load(stage, chunk_tile, Shape::kChunkTile, full);
        } else {
          bulk_load(stage + Shape::kK, chunk_tile->k, Shape::kMatrix, full);
          bulk_load(stage + Shape::kQ, chunk_tile->q, Shape::kChunkTile - Shape::kQ, full);
        }
      }
      if (loads_d_o) {
        if (thread_index() == 32) {
          // threads have filled this tile, if the last chunk is short; else who has read it has fenced
          if constexpr (!kSave) fence_async_shared();
          tma.bring(maps.v, coord.value_block * kValueBlock, head, c, stage + Shape::kTile, full);
        }
        mbarrier_arrive(full);
      } else {
        issue_tile(d_o, c, stage + Shape::kTile, full);
      }
    }
  } else if (thread_index() < kStateThread) {
    drain_reverse<kSave, Shape::kMatrix>(args, coord, value_blocks, shared + Shape::kD, barriers.d, shared + Shape::kV,
                                         barriers.v);
  } else {
    float state[kTileK / 2];
    load_state(args.d_final_state, coord, coord.n, args.K, args.V, state);
    Ring<Shape::kStages> ring;
    Ring<Shape::kBuffers> leaving;
    uint32_t a[kTileK / 16][4], a_lo[kTileK / 16][4];  // a_lo: kHiLo
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    const auto stage_floats = [&](int offset) {
      return reinterpret_cast<const float*>(shared + ring.slot * Shape::kStage + offset);
    };
    const auto pack_state = [&] {
      pack_fragments(state, a);
      if constexpr (kHiLo) pack_lo_parts(state, a, a_lo);
    };
    pack_state();
    if (chunks > 0) {
      barriers.stages.wait_full(ring);
      scale_columns(state, stage_floats(Shape::kGamma));
    }
    FW_NO_UNROLL
    for (int left = chunks; left > 0; --left) {
      // Here a stage is full, a = D and state = Diag(gamma) D.
      const uint32_t stage = base + ring.slot * Shape::kStage;
      uint32_t d_o[4][4], b[4][4];
      float v[32];
      wgmma_fence();
      if constexpr (kHiLo) {
        multiply_hi_lo_rows(v, a, a_lo, stage + Shape::kK, stage + Shape::kKeysLo, args.hi_lo.lo_parts != nullptr);
      } else {
        multiply_rows(v, a, stage + Shape::kK, false);
      }
      wgmma_commit();
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], stage + Shape::kTile, k);
      wgmma_fence();
      add_outer<kTileK>(state, d_o, stage + Shape::kQ);
      wgmma_commit();
      if constexpr (kSave) {
        barriers.d.wait_empty(leaving);
        const uint32_t to = base + Shape::kD + leaving.slot * Shape::kMatrix;
        FW_UNROLL
        for (int k = 0; k < kTileK / 16; ++k) store_state_fragment(to, k, a[k]);
        fence_async_shared();
        barriers.d.put_full(leaving);
      }
      wgmma_wait<1>();
      keep(v);
      if constexpr (kHiLo) scale_columns(v, stage_floats(Shape::kChunkTile));
      FW_UNROLL
      for (int i = 0; i < 32; ++i) v[i] = -v[i];
      pack_fragments(v, b);
      if constexpr (kHiLo) {
        uint32_t b_lo[4][4];
        pack_lo_parts(v, b, b_lo);
        wgmma_fence();
        add_hi_lo_outer<kTileK>(state, b, b_lo, stage + Shape::kY, stage + Shape::kLo);
        wgmma_commit();
      } else if constexpr (kDelta) {
        wgmma_fence();
        add_outer<kTileK>(state, b, stage + Shape::kY);
        wgmma_commit();
      }
      if constexpr (kSave) {
        barriers.v.wait_empty(leaving);
        const uint32_t to = base + Shape::kV + leaving.slot * kSw128Bytes;
        FW_UNROLL
        for (int k = 0; k < 4; ++k) {
          constexpr uint32_t kSigns = 0x80008000u;
          const uint32_t positive[4] = {b[k][0] ^ kSigns, b[k][1] ^ kSigns, b[k][2] ^ kSigns, b[k][3] ^ kSigns};
          store_token_fragment(to, k, positive);
        }
        fence_async_shared();
        barriers.v.put_full(leaving);
        leaving.next();
      }
      const Ring<Shape::kStages> done = ring;
      ring.next();
      if (left > 1) barriers.stages.wait_full(ring);
      wgmma_wait<0>();
      keep(state);
      barriers.stages.put_empty(done);
      pack_state();
      if (left > 1) scale_columns(state, stage_floats(Shape::kGamma));
    }
    store_state(args.d_initial_state, coord, args.final_index != nullptr ? args.final_index[coord.n] : coord.n, args.K,
                args.V, state);
  }
}

template <int kTileK, bool kDelta, bool kSave, bool kHiLo>
void launch_reverse(const ScanReverseArgs& args, void* stream) {
  const unsigned blocks = static_cast<unsigned>((args.V + kValueBlock - 1) / kValueBlock);
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.HV) * blocks, 1, 1};
  StageMaps stage;
  stage.values = map_tensor(args.d_o, args.shape, args.HV, args.V, stage.v) ? 1 : 0;
  launch_overlapped(scan_reverse_kernel<kTileK, kDelta, kSave, kHiLo>, grid, kScanThreads,
                    ReverseShape<kTileK, kDelta, kSave, kHiLo>::kShared, stream, args, stage);
}

template <int kTileK, bool kDelta, bool kHiLo>
void launch_reverse(const ScanReverseArgs& args, void* stream) {
  args.d_states != nullptr ? launch_reverse<kTileK, kDelta, true, kHiLo>(args, stream)
                           : launch_reverse<kTileK, kDelta, false, kHiLo>(args, stream);
}

template <int kTileK>
void launch_reverse(const ScanReverseArgs& args, void* stream) {
  if (!args.is_delta) return launch_reverse<kTileK, false, false>(args, stream);
  args.hi_lo.chunk_tiles != nullptr ? launch_reverse<kTileK, true, true>(args, stream)
                                    : launch_reverse<kTileK, true, false>(args, stream);
}

}  // namespace

void scan_reverse_tiles(const ScanReverseArgs& args, ReverseScan, int k_tile, void* stream) {
  k_tile == 64 ? launch_reverse<64>(args, stream) : launch_reverse<128>(args, stream);
}

}  // namespace fw::cuda
