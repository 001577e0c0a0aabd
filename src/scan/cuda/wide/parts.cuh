// What the two scans of keys of 129 to 256 channels share: the stage of a chunk, the state as an operand in shared memory, who brings what. See scan/parts.cuh,
// whose block, roles and fragments these are. The state [64 values, 256] takes 128 registers of a thread, so that its bf16 numbers have no place there beside
// the products: they lie in shared memory, where the products read them and from where they leave for the gradients.
#pragma once

#include "scan/cuda/scan/rows.cuh"

namespace fw::cuda {

// Bytes of shared memory: two stages (raw rows of k and q, A, P, a tile of v or d_o, numbers), the state's bf16 numbers, with kOut a buffer of O.
template <bool kOut>
struct WideShape {
  static constexpr int kMatrix = 64 * kWideKey * 2;
  static constexpr int kK = 0, kQ = kMatrix, kA = 2 * kMatrix, kP = kA + kPanelBytes, kTile = kP + kPanelBytes, kNumbers = kTile + kPanelBytes;
  static constexpr int kStage = round_to_panels(kNumbers + static_cast<int>(sizeof(WideNumbers)));
  static constexpr int kStages = 2, kState = kStages * kStage, kO = kState + kMatrix;
  static constexpr int kBarriers = kO + (kOut ? kPanelBytes : 0), kShared = kBarriers + kScanBarrierBytes;

  // tile: what leaves from a stage's tile, which its reader has left before; its place is the stage's.
  struct Barriers {
    RingBarriers<kStages> stages, tile;
    RingBarriers<1> state, o;
  };
  static_assert(kShared <= kScanSharedLimit && sizeof(Barriers) <= kScanBarrierBytes && sizeof(PairImage) == 2 * kPanelBytes);
};

// The tensors of a stage: raw rows of q and k, A (online) and P, and v or d_o.
struct WideStageArgs {
  const SequenceArg& sequences;
  const ScanRows& rows;
  const TokenArg& tile;
  const PairImage* pairs;
  const WideNumbers* numbers;
  int HV, K, V;
};

// By the 64 threads of warps 0 and 1, of whom thread 0 asks for A, P and numbers and 32 for rows: brings chunk c, number `item` of the images, into a stage
// that is empty, and says so. What the engine cannot take the threads copy.
template <class Shape, bool kOnline, bool kReads>
FW_DEVICE void bring_wide_stage(const WideStageArgs& a, const StageMaps& maps, const EnginePlace& engine, const ScanPlace& place, int c, char* stage,
                                uint64_t* full) {
  constexpr int kPanels = kWideKey / 64;
  const int64_t item = place.first_tile + static_cast<int64_t>(c) * a.HV;
  const bool whole = engine.takes(c), brings_tile = whole && maps.values != 0, brings_rows = whole && maps.rows != 0;
  if (thread_index() == 0) {
    mbarrier_expect(full, (kOnline ? kPanelBytes : 0) + (kReads ? kPanelBytes : 0) + static_cast<uint32_t>(sizeof(WideNumbers)) +
                              (brings_tile ? kTensorBytes : 0) + (brings_rows ? 2 * kPanels * kTensorBytes : 0));
    if constexpr (kOnline) bulk_load(stage + Shape::kA, a.pairs[item].a, kPanelBytes, full);
    if constexpr (kReads) bulk_load(stage + Shape::kP, a.pairs[item].p, kPanelBytes, full);
    bulk_load(stage + Shape::kNumbers, a.numbers + item, sizeof(WideNumbers), full);
  } else if (thread_index() == 32) {
    FW_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      if (!brings_rows) break;
      engine.bring(maps.k, 64 * panel, place.hv / a.rows.k.divisor, c, stage + Shape::kK + panel * kPanelBytes, full);
      engine.bring(maps.q, 64 * panel, place.hv / a.rows.q.divisor, c, stage + Shape::kQ + panel * kPanelBytes, full);
    }
    if (brings_tile) engine.bring(maps.v, place.value_block * kValueBlock, place.hv / a.tile.divisor, c, stage + Shape::kTile, full);
  }
  if (!brings_rows || !brings_tile) {
    if (!brings_rows) {
      fill_rows<kWideKey>(a.rows.k, a.sequences, place, c, a.K, stage + Shape::kK);
      fill_rows<kWideKey>(a.rows.q, a.sequences, place, c, a.K, stage + Shape::kQ);
    }
    if (!brings_tile) fill_tile(tile_rows(a.tile, a.sequences, place, a.V), c, stage + Shape::kTile);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();  // for the products, and for the engine, which has the place next
  }
  mbarrier_arrive(full);
}

inline StageMaps wide_maps(const ScanRows& rows, const TokenArg& tile, const TokenShape& shape, int HV, int K, int V) {
  StageMaps maps;
  maps.values = map_tensor(tile, shape, HV, V, maps.v) ? 1 : 0;
  maps.rows = map_tensor(rows.k, shape, HV, K, maps.k) && map_tensor(rows.q, shape, HV, K, maps.q) ? 1 : 0;
  return maps;
}

// d [64 values, 64 tokens] = the state's numbers times the transpose of the panels of rows.
FW_DEVICE void multiply_state(float (&d)[32], uint32_t state, uint32_t rows) {
  const uint64_t a = wgmma_descriptor(state, 16, 1024), b = wgmma_descriptor(rows, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kWideKey / 16; ++k) {
    const int at = k / 4 * kPanelBytes + k % 4 * 32;
    wgmma_ss<64, false, false>(d, descriptor_after(a, at), descriptor_after(b, at), k > 0);
  }
}

// By the state's warps: the state's numbers to shared memory, and the state decayed. Then they are there for products of all four warps.
FW_DEVICE void put_wide_state(float (&state)[kWideKey / 2], uint32_t to, float gamma) {
  FW_UNROLL
  for (int k = 0; k < kWideKey / 16; ++k) {
    uint32_t packed[4];
    FW_UNROLL
    for (int i = 0; i < 4; ++i) packed[i] = pack_bf16(state[8 * k + 2 * i], state[8 * k + 2 * i + 1]);
    store_state_fragment(to, k, packed);
  }
  FW_UNROLL
  for (float& x : state) x *= gamma;
  fence_async_shared();
  named_barrier_sync(1, kStateThreads);
}

}  // namespace fw::cuda
