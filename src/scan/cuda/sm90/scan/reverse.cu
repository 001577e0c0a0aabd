// The reverse scan over chunks of 64 tokens: D, the gradient of the state, from each sequence's end to its start
// (recurrence.md 5, in the form of tiles.h). Per sequence and value head, with raw d_o [tokens, HV, V], by form:
//   kAdditive     V = k D (BwdTiles)                            D = Diag(gamma) D + q^T dO
//   kTiles        V = k D (BwdTiles)                            D = Diag(gamma) D + q^T dO - y^T V
//   kHiLo         the same of rules with uses_hi_lo(): V = diag(scale) k D; D, V, k and y are sums of two bf16 values
//   kKeys         dR = P^T dO + Khat D, dZ = A^T dR             D = Diag(gamma) D + Q^T dO + E^T dZ (stores_k_hat())
//   kRows, kSums  dR = P^T dO + diag(k) K D, dZ = A^T dR        D = gamma D + Q^T (diag(q) dO + diag(erase_q) dZ)
//                                                                   + K^T (diag(read_k) dO + diag(e) dZ)
// kRows and kSums are of rules whose w is raw rows of k times a scale per row (reverse_takes_rows()): such rows of q
// and k, or (kSums) sums of both, with the numbers of RowScalesBwd. Writes, if requested, D^T at the end of every chunk
// (before the step) and V or dZ of every chunk for the gradients, and the gradient of the initial state. Products take
// bf16 operands and add in float32; D stays float32 throughout. The order of work is sm90/scan/forward.cu's.
//
// Roles, 256 threads, one block an SM (sm90/scan/parts.cuh):
//   warp     does                                              waits for                    says so to                shared memory
//   0, 1     load a chunk's stage: thread 0 asks for chunk     stages.empty                 stages.full               stages
//            tiles and numbers, 32 for rows
//   2        thread 64 takes D^T away                          d.full                       d.empty                   kD
//   3        thread 96 takes V (dZ) away                       v.full                       v.empty                   kV
//   4 to 7   the state's gradient in registers                 stages.full, {d, v}.empty    stages.empty, {d, v}.full read stages, write kD, kV
// Where the gradients run alongside (ScanReverseArgs::made) threads 64 and 96 count what is in memory.
#include <algorithm>
#include <cstddef>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/scan/traits.h"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/scan/decay_cutoff.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

namespace {

// Shared memory: bytes.
template <ReverseTraits kTraits>
struct ReverseShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr ReverseForm kForm = kTraits.form;
  static constexpr bool kSave = kTraits.saves, kSums = kForm == ReverseForm::kSums,
                        kRows = kForm == ReverseForm::kRows || kSums, kKeys = kForm == ReverseForm::kKeys,
                        kHiLo = kForm == ReverseForm::kHiLo, kDelta = kForm != ReverseForm::kAdditive,
                        kTiles = !kRows && !kKeys;
  static constexpr int kMatrix = 64 * kTileK * 2, kMatrices = kRows || !kDelta ? 2 : 3;
  // kTiles: k, y in place of E, q and gamma, then dO; others: A and P before and the numbers (kKeys: gamma) after dO.
  static constexpr int kK = kKeys ? 2 * kMatrix : 0, kE = kTiles ? kMatrix : 0,
                       kQ = kTiles && kDelta ? kE + kMatrix : kMatrix;
  static constexpr int kNumberBytes = !kRows  ? kTileK * 4
                                      : kSums ? static_cast<int>(sizeof(RowScalesBwd))
                                              : static_cast<int>(kPlainScaleBytes);
  static constexpr int kA = kMatrices * kMatrix, kP = kA + kSw128Bytes;
  static constexpr int kTile = kTiles ? round_to_sw128(kA + kNumberBytes) : kP + kSw128Bytes,
                       kNumbers = kTiles ? kA : kTile + kSw128Bytes, kChunkTile = kNumbers + kNumberBytes;
  static constexpr int kLo = kTiles ? kTile + kSw128Bytes : round_to_sw128(kChunkTile), kKeysLo = kLo + kMatrix,
                       kStage = kHiLo ? kKeysLo + kMatrix : kLo;
  static constexpr int kBuffers = 2;  // of each thing that leaves
  static constexpr int kOutputs = kSave ? kBuffers * (kMatrix + kSw128Bytes) : 0;
  static constexpr int kOwnBarrierBytes = kTiles ? 0 : kScanBarrierBytes;
  static constexpr int kStages = std::min(4, (kMaxSharedBytes - kOwnBarrierBytes - kOutputs) / kStage);
  static constexpr int kD = kStages * kStage, kV = kD + kBuffers * kMatrix;
  // kTiles: in the padding after the first stage's chunk tile.
  static constexpr int kBarriers = kTiles ? kChunkTile + (kHiLo ? 64 * 4 : 0) : kStages * kStage + kOutputs,
                       kShared = kStages * kStage + kOutputs + kOwnBarrierBytes;

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kBuffers> d, v;
  };
  static_assert(kStages >= (kHiLo || kKeys ? 2 : 3) && kShared <= kMaxSharedBytes &&
                sizeof(Barriers) <= kScanBarrierBytes && (!kTiles || kTile - kBarriers >= kScanBarrierBytes));
  static_assert(sizeof(BwdTiles<kTileK>) == 3 * kMatrix + kTileK * 4 && sizeof(IntraChunk) == 2 * kSw128Bytes &&
                offsetof(IntraChunk, p) == kSw128Bytes);
};

// By all threads: the chunks that the block goes through, from the last of them on; below 0: it has nothing to do.
template <class Shape>
FW_DEVICE int reverse_chunks(const ScanReverseArgs& args, const ScanCoord& coord, char* shared) {
  if (args.parts == nullptr) return coord.chunks;
  if ((args.parts[coord.n] & 1) == 0) return -1;
  if constexpr (!Shape::kSave) {
    const int fading = fading_chunks<Direction::kReverse>(args.uses_decay_cutoff, args.sequences, coord, shared);
    if (fading > 0) return fading;
  }
  return coord.chunks;
}

// By warps 2 and 3: D^T of each chunk, and V or dZ, to memory. Where the gradients run alongside, what is there is
// counted.
template <class Shape>
FW_DEVICE void drain_reverse(const ScanReverseArgs& args, const ScanCoord& coord, int value_blocks, const char* shared,
                             typename Shape::Barriers& barriers) {
  const bool drains_d = thread_index() == kStoreThread, drains_v = thread_index() == kStoreThread + 32;
  if (!Shape::kSave || (!drains_d && !drains_v)) return;
  uint32_t* const made = args.made != nullptr ? args.made + coord.first_tile : nullptr;
  Ring<Shape::kBuffers> ring;
  for (int c = coord.chunks - 1; c >= 0; --c, ring.next()) {
    const int64_t tile = (coord.first_tile + static_cast<int64_t>(c) * args.HV) * value_blocks + coord.value_block;
    if (drains_d) {
      barriers.d.wait_full(ring);
      drain_bulk(args.d_states + tile * (Shape::kMatrix / 2), shared + Shape::kD + ring.slot * Shape::kMatrix,
                 Shape::kMatrix, barriers.d.empty + ring.slot);
    } else {
      barriers.v.wait_full(ring);
      drain_bulk(args.v + tile * kSw128Elements, shared + Shape::kV + ring.slot * kSw128Bytes, kSw128Bytes,
                 barriers.v.empty + ring.slot);
    }
    if (made != nullptr && c + 1 < coord.chunks) count_drained<1>(made + static_cast<int64_t>(c + 1) * args.HV);
  }
  if (made != nullptr && coord.chunks > 0) count_drained<0>(made);
  bulk_wait<0>();
}

// By thread 0: starts the copies of chunk tile number `tile`, or of A, P and numbers, into a stage. Their bytes:
template <class Shape>
constexpr uint32_t reverse_tile_bytes() {
  return Shape::kTiles ? Shape::kChunkTile
                       : static_cast<uint32_t>(sizeof(IntraChunk)) + Shape::kNumberBytes +
                             (Shape::kKeys ? 3 * Shape::kMatrix : 0);
}
template <class Shape>
FW_DEVICE void issue_reverse_tiles(const ScanReverseArgs& args, int64_t tile, char* stage, uint64_t* full) {
  constexpr int kTileK = Shape::kTileK;
  if constexpr (Shape::kTiles) {
    const auto* const chunk_tile = static_cast<const BwdTiles<kTileK>*>(args.chunk_tiles) + tile;
    if constexpr (Shape::kHiLo) issue_lo_tiles<Shape, kTileK>(args.hi_lo, tile, stage, full);
    if constexpr (Shape::kDelta) {
      bulk_load(stage, chunk_tile, Shape::kChunkTile, full);
    } else {
      bulk_load(stage + Shape::kK, chunk_tile->k, Shape::kMatrix, full);
      bulk_load(stage + Shape::kQ, chunk_tile->q, Shape::kChunkTile - Shape::kQ, full);
    }
  } else {
    bulk_load(stage + Shape::kA, args.pairs + tile, sizeof(IntraChunk), full);
    if constexpr (Shape::kKeys) {
      const auto* const chunk_tile = static_cast<const QETiles<kTileK>*>(args.chunk_tiles) + tile;
      bulk_load(stage + Shape::kK, args.keys + tile * (64 * kTileK), Shape::kMatrix, full);
      bulk_load(stage + Shape::kE, chunk_tile->e, 2 * Shape::kMatrix, full);
      bulk_load(stage + Shape::kNumbers, chunk_tile->gamma, Shape::kNumberBytes, full);
    } else {
      bulk_load(stage + Shape::kNumbers, args.numbers + tile, Shape::kNumberBytes, full);
    }
  }
}

// By warps 0 and 1.
template <class Shape>
FW_DEVICE void load_reverse_stages(const ScanReverseArgs& args, const StageMaps& maps, const ScanCoord& coord,
                                   int chunks, char* shared, RingBarriers<Shape::kStages>& barriers) {
  constexpr int kTileK = Shape::kTileK, kRowSw128Tiles = Shape::kRows ? kTileK / 64 : 0;
  const TileRows d_o = tile_rows(args.d_o, args.sequences, coord, args.V);
  const TmaCoord tma(args.sequences, coord);
  const int d_o_head = coord.hv / args.d_o.divisor, q_head = Shape::kRows ? coord.hv / args.rows.q.divisor : 0,
            k_head = Shape::kRows ? coord.hv / args.rows.k.divisor : 0;
  Ring<Shape::kStages> ring;
  for (int c = chunks - 1; c >= 0; --c, ring.next()) {
    char* const stage = shared + ring.slot * Shape::kStage;
    uint64_t* const full = barriers.full + ring.slot;
    const int64_t tile = coord.first_tile + static_cast<int64_t>(c) * args.HV;
    barriers.wait_empty(ring);
    const bool whole = tma.takes(c), loads_d_o = whole && maps.values != 0,
               loads_rows = !Shape::kRows || (whole && maps.rows != 0);
    if (thread_index() == 0) {
      mbarrier_expect(full, reverse_tile_bytes<Shape>() + (loads_d_o ? kTensorBytes : 0) +
                                (loads_rows ? 2 * kRowSw128Tiles * kTensorBytes : 0) +
                                (Shape::kHiLo ? lo_bytes<kTileK>(args.hi_lo) : 0));
      issue_reverse_tiles<Shape>(args, tile, stage, full);
    } else if (thread_index() == 32) {
      FW_UNROLL
      for (int sw128 = 0; sw128 < kRowSw128Tiles; ++sw128) {
        if (!loads_rows) break;
        tma.bring(maps.k, 64 * sw128, k_head, c, stage + Shape::kK + sw128 * kSw128Bytes, full);
        tma.bring(maps.q, 64 * sw128, q_head, c, stage + Shape::kQ + sw128 * kSw128Bytes, full);
      }
      // kTiles: threads have filled this tile, if the last chunk is short; else who has read it has fenced
      if (Shape::kTiles && !Shape::kSave && loads_d_o) fence_async_shared();
      if (loads_d_o) tma.bring(maps.v, coord.value_block * kValueBlock, d_o_head, c, stage + Shape::kTile, full);
    }
    if (Shape::kTiles && !loads_d_o) {
      issue_tile(d_o, c, stage + Shape::kTile, full);
      continue;
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
}

template <class Shape>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_reverse_kernel(const ScanReverseArgs args, const __grid_constant__ StageMaps maps) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kSave = Shape::kSave, kTiles = Shape::kTiles, kHiLo = Shape::kHiLo, kDelta = Shape::kDelta,
                 kRows = Shape::kRows, kSums = Shape::kSums, kKeys = Shape::kKeys;
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
  const int value_blocks = value_block_count(args.V);
  const ScanCoord coord = scan_coord(args.sequences, args.HV, value_blocks, 0);
  const int chunks = reverse_chunks<Shape>(args, coord, shared);
  if (chunks < 0) return;

  if (thread_index() < kStoreThread) {
    load_reverse_stages<Shape>(args, maps, coord, chunks, shared, barriers.stages);
  } else if (thread_index() < kStateThread) {
    drain_reverse<Shape>(args, coord, value_blocks, shared, barriers);
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
    const auto numbers = [&] { return reinterpret_cast<const RowScalesBwd*>(stage_floats(Shape::kNumbers)); };  // kRows
    const auto pack_state = [&] {
      pack_fragments(state, a);
      if constexpr (kHiLo) pack_lo_parts(state, a, a_lo);
    };
    const auto decay_state = [&] {
      if constexpr (kRows) {
        const float gamma = numbers()->gamma[0];
        FW_UNROLL
        for (float& x : state) x *= gamma;
      } else {
        scale_columns(state, stage_floats(Shape::kNumbers));
      }
    };
    pack_state();
    if (chunks > 0) {
      barriers.stages.wait_full(ring);
      decay_state();
    }
    FW_NO_UNROLL
    for (int left = chunks; left > 0; --left) {
      // Here a stage is full, a = D and state = Diag(gamma) D.
      const uint32_t stage = base + ring.slot * Shape::kStage;
      uint32_t d_o[4][4], b[4][4];
      float v[32];
      if constexpr (kTiles) {
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
        if constexpr (kSave) put_state(barriers.d, leaving, base + Shape::kD, a);
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
          add_hi_lo_outer<kTileK>(state, b, b_lo, stage + Shape::kE, stage + Shape::kLo);
          wgmma_commit();
        } else if constexpr (kDelta) {
          wgmma_fence();
          add_outer<kTileK>(state, b, stage + Shape::kE);
          wgmma_commit();
        }
        if constexpr (kSave) put_tokens(barriers.v, leaving, base + Shape::kV, b, 0x80008000u);
      } else {
        [[maybe_unused]] uint32_t scaled[4][4];  // kRows
        float r[32], z[32];
        FW_UNROLL
        for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], stage + Shape::kTile, k);
        wgmma_fence();
        multiply_rows(v, a, stage + Shape::kK, false);
        multiply_outer(r, d_o, stage + Shape::kP);
        wgmma_commit();
        if constexpr (kKeys) {
          add_outer<kTileK>(state, d_o, stage + Shape::kQ);
          wgmma_commit();
        } else if constexpr (!kSums) {
          scale_fragments(d_o, numbers()->q, scaled);
          wgmma_fence();
          add_outer<kTileK>(state, scaled, stage + Shape::kQ);
          wgmma_commit();
        }
        if constexpr (kSave) put_state(barriers.d, leaving, base + Shape::kD, a);
        wgmma_wait<kSums ? 0 : 1>();
        keep(v);
        keep(r);
        if constexpr (kRows) scale_columns(v, numbers()->k);
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
        if constexpr (kSave) put_tokens(barriers.v, leaving, base + Shape::kV, b);
        if constexpr (kSums) {
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
          if constexpr (kSums) add_fragments(z, d_o, numbers()->read_k);
          pack_fragments(z, scaled);
          wgmma_fence();
          if constexpr (kSums) add_outer<kTileK>(state, b, stage + Shape::kQ);
          add_outer<kTileK>(state, scaled, stage + Shape::kE);
        }
        wgmma_commit();
      }
      leaving.next();
      const Ring<Shape::kStages> done = ring;
      ring.next();
      if (left > 1) barriers.stages.wait_full(ring);
      wgmma_wait<0>();
      keep(state);
      barriers.stages.put_empty(done);
      pack_state();
      if (left > 1) decay_state();
    }
    store_state(args.d_initial_state, coord, args.final_index != nullptr ? args.final_index[coord.n] : coord.n, args.K,
                args.V, state);
  }
}

template <ReverseTraits kTraits>
void launch_reverse(const ScanReverseArgs& args, void* stream) {
  using Shape = ReverseShape<kTraits>;
  StageMaps maps;
  maps.values = map_tensor(args.d_o, args.shape, args.HV, args.V, maps.v) ? 1 : 0;
  if constexpr (Shape::kRows) maps.rows = map_rows(args.rows, args.shape, args.HV, args.K, maps) ? 1 : 0;
  launch_overlapped(scan_reverse_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V)),
                    kScanThreads, Shape::kShared, stream, args, maps);
}

template <ReverseForm kForm>
void launch_reverse(const ScanReverseArgs& args, int k_tile, void* stream) {
  with_constants(
      [&](auto small, auto saves) {
        launch_reverse<ReverseTraits{.k_tile = small ? 64 : 128, .form = kForm, .saves = saves}>(args, stream);
      },
      k_tile == 64, args.d_states != nullptr);
}

}  // namespace

void scan_reverse_tiles(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream) {
  if (kernel == ReverseScan::kKeys) return launch_reverse<ReverseForm::kKeys>(args, k_tile, stream);
  if (kernel == ReverseScan::kRows) {
    return args.mixed ? launch_reverse<ReverseForm::kSums>(args, k_tile, stream)
                      : launch_reverse<ReverseForm::kRows>(args, k_tile, stream);
  }
  if (!args.is_delta) return launch_reverse<ReverseForm::kAdditive>(args, k_tile, stream);
  args.hi_lo.chunk_tiles != nullptr ? launch_reverse<ReverseForm::kHiLo>(args, k_tile, stream)
                                    : launch_reverse<ReverseForm::kTiles>(args, k_tile, stream);
}

}  // namespace fw::cuda
