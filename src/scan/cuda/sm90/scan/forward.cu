// The forward scan over chunks of 64 tokens (recurrence.md 4, in the dual form of tiles.h). Per sequence and value
// head, with FwdTiles made by prepare() and raw values v [tokens, HV, V] or prepared Z SW128 tiles:
//   W = Z + E S      O = Q S + M W      S = Diag(gamma) S + X^T W          (additive rules: W = Z)
// Writes o (rows of each sequence only) and the final states, and for the gradients S^T at the start of every chunk and
// W (kPairs: U) of every chunk. Products take bf16 operands and add in float32; S stays float32 throughout.
//
// kHiLo: of rules with uses_hi_lo() (rule_traits.h): W = Z + diag(scale) e S, and S, W, e and X are sums of two
// bf16 values there and in X^T W.
// kRows: with RowTiles and the raw rows of k and q: W = Z + diag(e) k S, O = diag(q) q S + M W.
// kPairs: with those rows, A, P and RowScales: then U = A W, O = diag(q) q S + P U, S = gamma S + k^T diag(k) U.
// kSums: the same where E and Q are sums: W has diag(erase_q) q S besides, O diag(read_k) k S.
// kSplitTiles: with QETiles and XMTiles in place of FwdTiles.
//
// The order of work keeps the tensor cores busy and is what ptxas allows without serialising products (it says so:
// C7510 to C7518; the machine code then has a wait after each product). While products are in flight, their own
// accumulators and register operands stay untouched; other operands may be packed, and a state whose own product was
// waited for may be packed and scaled. But accumulators that were last written by a product of the round before may not
// be touched once a product of this round is in flight. So the state is scaled for the next chunk at the end of a
// round, and O is packed there. No product is in flight across the loop's end.
//
// Roles, 256 threads, one block an SM (sm90/scan/parts.cuh):
//   warp     does                                              waits for                    says so to                shared memory
//   0, 1     load chunk tiles, v (or Z) and raw rows of a chunk;   stages.empty                 stages.full               stages: kE, kQ, kX, kM, kNumbers,
//   kTile
//            thread 0 asks for chunk tiles, 32 for raw rows
//   2        thread 64 takes S^T away; with 3 bf16 rows of O   s.full, o.full               s.empty, o.empty          kS, kO
//   3        thread 96 takes W away; with 2 bf16 rows of O     w.full, o.full               w.empty, o.empty          kW, kO
//   4 to 7   the state in registers: W, O, S of a chunk        stages.full, {o, s, w}.empty stages.empty, {..}.full   read stages, write kO, kS, kW
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/scan/outputs.cuh"
#include "scan/cuda/common/scan/traits.h"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm90/scan/decay_cutoff.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

namespace {

// The parts of a chunk tile that this kernel reads, then the Z tile, in shared memory: bytes.
template <ForwardTraits kTraits>
struct ForwardShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr ForwardForm kForm = kTraits.form;
  static constexpr bool kOut = kTraits.writes_o, kSave = kTraits.saves;
  static constexpr bool kSums = kForm == ForwardForm::kSums, kPairs = kForm == ForwardForm::kPairs || kSums,
                        kReads = kOut || kSums;
  static constexpr bool kRows = kForm == ForwardForm::kRows || kPairs, kHiLo = kForm == ForwardForm::kHiLo,
                        kDelta = kForm != ForwardForm::kAdditive;
  static constexpr bool kSplitTiles = kForm == ForwardForm::kSplitTiles;
  using ChunkTile = std::conditional_t<
      kSplitTiles, QETiles<kTileK>,
      std::conditional_t<kPairs, RowScales, std::conditional_t<kRows, RowTiles<kTileK>, FwdTiles<kTileK>>>>;
  static constexpr int kMatrix = 64 * kTileK * 2;
  // kPairs: A in place of x, P in that of m.
  static constexpr int kE = 0, kQ = kE + (kDelta ? kMatrix : 0), kX = kQ + (kReads ? kMatrix : 0),
                       kM = kX + (kPairs ? kSw128Bytes : kMatrix);
  static constexpr int kNumbers = kM + (kOut ? kSw128Bytes : 0);
  // Chunk tiles: gamma, z_scale; rows: e, q (kPairs: k), z_scale, gamma (kSums: erase_q, read_k).
  static constexpr int kKeyScale = kNumbers + 128 * 4,
                       kScale = kPairs ? kKeyScale + 64 * 4 : kNumbers + (kRows ? 128 : kTileK) * 4,
                       kGamma = kRows ? kScale + 64 * 4 : kNumbers;
  static constexpr int kEraseReads = kGamma + 16, kReadKeys = kEraseReads + 64 * 4;
  static constexpr int kChunkTile = kSums   ? kReadKeys + 64 * 4
                                    : kRows ? kGamma + 16
                                            : kScale + 64 * 4,
                       kTile = round_to_sw128(kChunkTile);
  static constexpr int kLo = kTile + kSw128Bytes, kKeysLo = kLo + kMatrix, kStage = kHiLo ? kKeysLo + kMatrix : kLo;
  static constexpr int kBuffers = kOut && kSave && kDelta && kTileK == 128 ? 1 : 2;  // of each thing that leaves
  static constexpr int kOutputs = kBuffers * ((kOut ? kSw128Bytes : 0) + (kSave ? kMatrix + kSw128Bytes : 0));
  static constexpr int kStages = std::min(4, (kMaxSharedBytes - kOutputs) / kStage);
  static constexpr int kO = kStages * kStage, kS = kO + (kOut ? kBuffers * kSw128Bytes : 0),
                       kW = kS + (kSave ? kBuffers * kMatrix : 0);
  // In the padding after the first stage's chunk tile, or, where a lo tile has its scales there, after everything.
  static constexpr int kBarriers = kHiLo ? kStages * kStage + kOutputs : kChunkTile,
                       kShared = kStages * kStage + kOutputs + (kHiLo ? kScanBarrierBytes : 0);

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kBuffers> o, s, w;
  };
  static_assert(kStages >= 2 && kShared <= kMaxSharedBytes &&
                sizeof(Barriers) <= (kHiLo ? kScanBarrierBytes : kTile - kChunkTile));
  static_assert(kPairs || kSplitTiles ||
                sizeof(ChunkTile) == (kRows ? 1 : 3) * kMatrix + kSw128Bytes + (kRows ? 3 * 64 + 32 : kTileK + 64) * 4);
};

// One thread: starts the copies of chunk tile number `tile` into a stage, of tiles_bytes.
template <class Shape>
constexpr uint32_t tiles_bytes() {
  return Shape::kChunkTile - (Shape::kRows ? Shape::kX : 0);
}
template <class Shape>
FW_DEVICE void issue_tiles(char* stage, const ScanForwardArgs& args, int64_t tile, uint64_t* full) {
  constexpr bool kOut = Shape::kOut;
  const auto* const chunk_tile = static_cast<const typename Shape::ChunkTile*>(args.chunk_tiles) + tile;
  if constexpr (Shape::kSplitTiles) {
    bulk_load(stage + Shape::kE, chunk_tile->e, Shape::kX - Shape::kE, full);
    bulk_load(stage + Shape::kX, static_cast<const XMTiles<Shape::kTileK>*>(args.solved)[tile].x,
              Shape::kNumbers - Shape::kX, full);
    bulk_load(stage + Shape::kNumbers, chunk_tile->gamma, Shape::kChunkTile - Shape::kNumbers, full);
  } else if constexpr (Shape::kPairs) {
    bulk_load(stage + Shape::kX, args.pairs[tile].a, Shape::kNumbers - Shape::kX, full);
    bulk_load(stage + Shape::kNumbers, chunk_tile->e, Shape::kChunkTile - Shape::kNumbers, full);
  } else if constexpr (Shape::kRows) {
    if constexpr (kOut) {
      bulk_load(stage + Shape::kX, chunk_tile->x, tiles_bytes<Shape>(), full);
    } else {
      bulk_load(stage + Shape::kX, chunk_tile->x, Shape::kMatrix, full);
      bulk_load(stage + Shape::kNumbers, chunk_tile->e, Shape::kChunkTile - Shape::kNumbers, full);
    }
  } else if constexpr (kOut) {
    bulk_load(stage, Shape::kDelta ? chunk_tile->e : chunk_tile->q, Shape::kChunkTile, full);
  } else {
    if constexpr (Shape::kDelta) bulk_load(stage + Shape::kE, chunk_tile->e, Shape::kMatrix, full);
    bulk_load(stage + Shape::kX, chunk_tile->x, Shape::kMatrix, full);
    bulk_load(stage + Shape::kNumbers, chunk_tile->gamma, Shape::kChunkTile - Shape::kNumbers, full);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_forward_kernel(const ScanForwardArgs args, const __grid_constant__ StageMaps maps) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kOut = Shape::kOut, kSave = Shape::kSave, kSums = Shape::kSums, kReads = Shape::kReads,
                 kPairs = Shape::kPairs, kRows = Shape::kRows, kHiLo = Shape::kHiLo, kDelta = Shape::kDelta;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  const int value_blocks = value_block_count(args.V),
            map_blocks = args.maps.data != nullptr ? value_block_count(args.K) : 0;
  // Blocks of a map have Z = 0.
  const bool z_ready =
      args.z != nullptr && static_cast<int>(block_index_x()) % (value_blocks + map_blocks) < value_blocks;
  if (thread_index() == 0) {
    barriers.stages.init(z_ready && !kRows ? 1 : 1 + static_cast<int>(kStoreThread), kStateThreads);
    barriers.o.init(kStateThreads, 64);
    barriers.s.init(kStateThreads, 1);
    barriers.w.init(kStateThreads, 1);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const ScanCoord coord = scan_coord(args.sequences, args.HV, value_blocks, map_blocks);
  if (args.parts != nullptr && (args.parts[coord.n] >> (coord.map ? 1 : 0) & 1) == 0) return;
  int start = 0;  // the first chunk
  if constexpr (!kOut && !kSave) {
    if (args.parts != nullptr) {
      const int fading = fading_chunks<Direction::kForward>(args.uses_decay_cutoff, args.sequences, coord, shared);
      if (fading > 0 && coord.map) {
        const float nothing[kTileK / 2] = {};
        if (thread_index() >= kStateThread) store_state(args.maps, coord, coord.n, args.K, args.K, nothing);
        return;
      }
      if (fading > 0) start = coord.chunks - fading;
    }
  }
  // Index of the tiles of this block: chunk 0, and the step to the next chunk.
  const int64_t first_block = coord.first_tile * value_blocks + coord.value_block,
                block_step = static_cast<int64_t>(args.HV) * value_blocks;

  if (thread_index() < kStoreThread) {
    const uint16_t* z = args.z + (z_ready ? (first_block + start * block_step) * kSw128Elements : 0);
    const TileRows v = tile_rows(coord.map ? TokenArg{} : args.v, args.sequences, coord, args.V);
    // Who fills nothing does not wait either: with nobody waiting for it, it could miss a phase of a barrier and wait
    // for ever.
    const int rounds = z_ready && !kRows && thread_index() != 0 ? 0 : coord.chunks;
    const TmaCoord tma(args.sequences, coord);
    constexpr int kRowSw128Tiles = kRows ? kTileK / 64 : 0,
                  kRowBytes = (kReads ? 2 : 1) * kRowSw128Tiles * static_cast<int>(kTensorBytes);
    const int v_head = coord.hv / args.v.divisor;
    Ring<Shape::kStages> ring;
    for (int c = start; c < rounds; ++c, ring.next()) {
      char* const stage = shared + ring.slot * Shape::kStage;
      uint64_t* const full = barriers.stages.full + ring.slot;
      barriers.stages.wait_empty(ring);
      const bool whole = tma.takes(c), loads_v = whole && maps.values != 0 && !z_ready && !coord.map,
                 loads_rows = !kRows || (whole && maps.rows != 0);
      if (thread_index() == 0) {
        const uint32_t hi_lo = kHiLo ? lo_bytes<kTileK>(args.hi_lo) : 0;
        mbarrier_expect(
            full, tiles_bytes<Shape>() + (z_ready || loads_v ? kSw128Bytes : 0) + (loads_rows ? kRowBytes : 0) + hi_lo);
        const int64_t tile = coord.first_tile + static_cast<int64_t>(c) * args.HV;
        issue_tiles<Shape>(stage, args, tile, full);
        if constexpr (kHiLo) issue_lo_tiles<Shape, kTileK>(args.hi_lo, tile, stage, full);
        if (z_ready) bulk_load(stage + Shape::kTile, z, kSw128Bytes, full);
        if (z_ready) z += block_step * kSw128Elements;
      } else if (thread_index() == 32) {
        FW_UNROLL
        for (int sw128 = 0; sw128 < kRowSw128Tiles; ++sw128) {
          if (!loads_rows) break;
          tma.bring(maps.k, 64 * sw128, coord.hv / args.rows.k.divisor, c, stage + Shape::kE + sw128 * kSw128Bytes,
                    full);
          if constexpr (kReads)
            tma.bring(maps.q, 64 * sw128, coord.hv / args.rows.q.divisor, c, stage + Shape::kQ + sw128 * kSw128Bytes,
                      full);
        }
        if (loads_v) tma.bring(maps.v, coord.value_block * kValueBlock, v_head, c, stage + Shape::kTile, full);
      }
      const bool zeros = coord.map && c >= Shape::kStages;  // the tile of zeros is there from the first round
      const bool fills_tile = !z_ready && !loads_v && !zeros;
      if (!loads_rows) {
        copy_rows<kTileK>(args.rows.k, args.sequences, coord, c, args.K, stage + Shape::kE);
        if constexpr (kReads) copy_rows<kTileK>(args.rows.q, args.sequences, coord, c, args.K, stage + Shape::kQ);
        if (fills_tile) fill_tile(v, c, stage + Shape::kTile);
        cp_async_commit();
        cp_async_wait<0>();
        fence_async_shared();
        mbarrier_arrive(full);
      } else if (fills_tile) {
        issue_tile(v, c, stage + Shape::kTile, full);
      } else if (kRows || !z_ready) {
        mbarrier_arrive(full);
      }
    }
  } else if (thread_index() < kStateThread) {
    const bool drains_s = kSave && thread_index() == kStoreThread,
               drains_w = kSave && thread_index() == kStoreThread + 32;
    const TileRows o = tile_rows(args.o, args.sequences, coord, args.V);
    Ring<Shape::kBuffers> ring;
    for (int c = start; c < coord.chunks; ++c, ring.next()) {
      const int64_t tile = first_block + c * block_step;
      if (drains_s) {
        barriers.s.wait_full(ring);
        drain_bulk(args.states + tile * (64 * kTileK), shared + Shape::kS + ring.slot * Shape::kMatrix, Shape::kMatrix,
                   barriers.s.empty + ring.slot);
      }
      if (drains_w) {
        barriers.w.wait_full(ring);
        drain_bulk(args.w + tile * kSw128Elements, shared + Shape::kW + ring.slot * kSw128Bytes, kSw128Bytes,
                   barriers.w.empty + ring.slot);
      }
      if (kOut && o.rows.bf16 != 0) {
        barriers.o.wait_full(ring);
        store_bf16_rows(o, c, shared + Shape::kO + ring.slot * kSw128Bytes,
                        static_cast<int>(thread_index() - kStoreThread));
        barriers.o.put_empty(ring);
      }
    }
    if (drains_s || drains_w) bulk_wait<0>();
  } else {
    const TileRows out = tile_rows(args.o, args.sequences, coord, args.V);
    float state[kTileK / 2];
    if (coord.map) {
      unit_state(coord, state);
    } else {
      load_state(args.initial_state, coord, coord.n, args.K, args.V, state);
    }
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    const auto store_out = [&](const uint32_t(&packed)[4][4], const Ring<Shape::kBuffers>& to) {
      barriers.o.wait_empty(to);
      const uint32_t sw128 = base + Shape::kO + to.slot * kSw128Bytes;
      FW_UNROLL
      for (int k = 0; k < 4; ++k) store_token_fragment(sw128, k, packed[k]);
      barriers.o.put_full(to);
    };
    Ring<Shape::kStages> ring;
    Ring<Shape::kBuffers> leaving, leaving_out;
    uint32_t a[kTileK / 16][4], a_lo[kTileK / 16][4], packed_out[4][4];  // a_lo: kHiLo
    CheckpointWalk checkpoints(args.checkpoints, args.sequences, coord);
    const auto stage_floats = [&](int offset) {
      return reinterpret_cast<const float*>(shared + ring.slot * Shape::kStage + offset);
    };
    const auto pack_state = [&] {
      pack_fragments(state, a);
      if constexpr (kHiLo) pack_lo_parts(state, a, a_lo);
    };
    // Of the stage that is full.
    const auto decay_state = [&] {
      if constexpr (kRows) {
        const float gamma = *stage_floats(Shape::kGamma);
        FW_UNROLL
        for (float& x : state) x *= gamma;
      } else {
        scale_columns(state, stage_floats(Shape::kGamma));
      }
    };
    pack_state();
    if (coord.chunks > 0) {
      barriers.stages.wait_full(ring);
      decay_state();
    }
    FW_NO_UNROLL
    for (int c = start; c < coord.chunks; ++c) {
      // Here a stage is full, a = S, state = Diag(gamma) S, and packed_out is O of the chunk before.
      const uint32_t stage = base + ring.slot * Shape::kStage;
      uint32_t b[4][4];
      float w[32], o[32];
      wgmma_fence();
      if constexpr (kDelta) {
        if constexpr (kHiLo) {
          multiply_hi_lo_rows(w, a, a_lo, stage + Shape::kE, stage + Shape::kKeysLo, args.hi_lo.lo_parts != nullptr);
        } else {
          multiply_rows(w, a, stage + Shape::kE, false);
        }
        wgmma_commit();
      }
      if constexpr (kReads) {
        multiply_rows(o, a, stage + Shape::kQ, false);
        wgmma_commit();
      }
      if constexpr (kOut) {
        if (c > 0 && out.rows.bf16 != 0) {
          store_out(packed_out, leaving_out);
          leaving_out.next();
        }
      }
      if constexpr (kSave) {
        put_state(barriers.s, leaving, base + Shape::kS, a);
      }
      if constexpr (kHiLo) {
        uint32_t b_lo[4][4];
        wgmma_wait<kOut ? 1 : 0>();
        keep(w);
        float z[32];
        load_z(z, stage + Shape::kTile, stage_floats(Shape::kScale));
        add_scaled(z, stage_floats(Shape::kChunkTile), w);
        pack_fragments(z, b);
        pack_lo_parts(z, b, b_lo);
        wgmma_fence();
        add_hi_lo_outer<kTileK>(state, b, b_lo, stage + Shape::kX, stage + Shape::kLo);
      } else {
        float z[32];
        load_z(z, stage + Shape::kTile, stage_floats(Shape::kScale));
        if constexpr (kDelta) {
          wgmma_wait<kOut && !kSums ? 1 : 0>();
          keep(w);
          if constexpr (kSums) {
            keep(o);
            add_scaled(z, stage_floats(Shape::kEraseReads), o);
          }
          if constexpr (kRows) {
            add_scaled(z, stage_floats(Shape::kNumbers), w);
          } else {
            FW_UNROLL
            for (int i = 0; i < 32; ++i) z[i] += w[i];
          }
        }
        pack_fragments(z, b);
        wgmma_fence();
        if constexpr (kPairs) {
          float u[32];
          multiply_rows(u, b, stage + Shape::kX, false);
          wgmma_commit();
          wgmma_wait<0>();
          keep(u);
          pack_fragments(u, b);
          scale_columns(u, stage_floats(Shape::kKeyScale));
          uint32_t scaled[4][4];
          pack_fragments(u, scaled);
          wgmma_fence();
          add_outer<kTileK>(state, scaled, stage + Shape::kE);
        } else {
          add_outer<kTileK>(state, b, stage + Shape::kX);
        }
      }
      wgmma_commit();
      if constexpr (kOut) {
        if constexpr (kRows) {
          if constexpr (!kPairs) wgmma_wait<1>();
          keep(o);
          scale_columns(o, stage_floats(Shape::kNumbers) + 64);
          if constexpr (kSums) add_scaled(o, stage_floats(Shape::kReadKeys), w);
          wgmma_fence();
        }
        multiply_rows(o, b, stage + Shape::kM, true);
        wgmma_commit();
      }
      if constexpr (kSave) {
        put_tokens(barriers.w, leaving, base + Shape::kW, b);
        leaving.next();
      }
      const Ring<Shape::kStages> done = ring;
      ring.next();
      if (c + 1 < coord.chunks) barriers.stages.wait_full(ring);
      wgmma_wait<kOut ? 1 : 0>();
      keep(state);
      if (kOut && checkpoints.reached()) [[unlikely]]  // without o the call is not the caller's
        store_state(args.checkpoints.states, coord, checkpoints.next(args.checkpoints, coord, c), args.K, args.V,
                    state);
      pack_state();
      if (c + 1 < coord.chunks) decay_state();
      keep(state);
      wgmma_wait<0>();
      barriers.stages.put_empty(done);
      if constexpr (kOut) {
        keep(o);
        pack_fragments(o, packed_out);
        if (out.rows.bf16 == 0) store_float_rows(out, c, o);
      }
    }
    if (kOut && coord.chunks > 0 && out.rows.bf16 != 0) store_out(packed_out, leaving_out);
    if (coord.map) {
      store_state(args.maps, coord, coord.n, args.K, args.K, state);
    } else {
      store_state(args.final_state, coord, args.final_index != nullptr ? args.final_index[coord.n] : coord.n, args.K,
                  args.V, state);
    }
  }
}

template <ForwardTraits kTraits>
void launch_forward(const ScanForwardArgs& args, void* stream) {
  using Shape = ForwardShape<kTraits>;
  const int maps = args.maps.data != nullptr ? value_block_count(args.K) : 0;
  StageMaps stage;
  stage.values = args.z == nullptr && map_tensor(args.v, args.shape, args.HV, args.V, stage.v) ? 1 : 0;
  if constexpr (Shape::kRows) stage.rows = map_rows(args.rows, args.shape, args.HV, args.K, stage) ? 1 : 0;
  launch_overlapped(scan_forward_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V) + maps),
                    kScanThreads, Shape::kShared, stream, args, stage);
}

template <ForwardForm kForm>
void launch_forward(const ScanForwardArgs& args, int k_tile, void* stream) {
  with_constants(
      [&](auto small, auto writes_o, auto saves) {
        launch_forward<ForwardTraits{.k_tile = small ? 64 : 128, .form = kForm, .writes_o = writes_o, .saves = saves}>(
            args, stream);
      },
      k_tile == 64, args.o.data != nullptr, args.states != nullptr);
}

}  // namespace

void scan_forward_tiles(const ScanForwardArgs& args, ForwardScan kernel, int k_tile, void* stream) {
  switch (kernel) {
    case ForwardScan::kAdditive:
      return launch_forward<ForwardForm::kAdditive>(args, k_tile, stream);
    case ForwardScan::kTiles:
      return launch_forward<ForwardForm::kTiles>(args, k_tile, stream);
    case ForwardScan::kSplitTiles:
      return launch_forward<ForwardForm::kSplitTiles>(args, k_tile, stream);
    case ForwardScan::kHiLo:
      return launch_forward<ForwardForm::kHiLo>(args, k_tile, stream);
    case ForwardScan::kRows:
      return launch_forward<ForwardForm::kRows>(args, k_tile, stream);
    case ForwardScan::kPairs:
      return launch_forward<ForwardForm::kPairs>(args, k_tile, stream);
    case ForwardScan::kSums:
      return launch_forward<ForwardForm::kSums>(args, k_tile, stream);
    default:
      fail_internal("scan_forward_tiles: expected a kernel of chunk tiles, got number {}", static_cast<int>(kernel));
  }
}

}  // namespace fw::cuda
