// What the two scans of the chunk form on Hopper share. A block has 256 threads: warps 0 and 1 load the chunks' stages
// into shared memory, warps 2 and 3 take what leaves it, and warps 4 to 7 keep the state ("the state's warps").
#pragma once

#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "scan/cuda/common/scan/parts.cuh"

namespace fw::cuda {

inline constexpr unsigned kScanThreads = 256;
inline constexpr unsigned kStoreThread = 64, kStateThread = 128;  // the first threads of their parts; loads begin at 0
inline constexpr int kStateThreads = 128;
inline constexpr int kScanBarrierBytes = 256;

// fill_tile() of warps 0 and 1, which arrive once.
FW_DEVICE void issue_tile(const TileRows& t, int c, char* sw128, uint64_t* full) {
  if (fill_tile(t, c, sw128)) {
    cp_async_arrive(full);
  } else {
    mbarrier_arrive(full);
  }
}

// ---- What leaves, for the thread that copies it away: by the state's warps ---------------------------------------------------------

// The state's bf16 values, into a buffer of those that begin at `buffers`.
template <int kDepth, int kSteps>
FW_DEVICE void put_state(RingBarriers<kDepth>& barriers, const Ring<kDepth>& ring, uint32_t buffers,
                         const uint32_t (&a)[kSteps][4]) {
  barriers.wait_empty(ring);
  const uint32_t to = buffers + ring.slot * (kSteps * 16 * 64 * 2);
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k) store_state_fragment(to, k, a[k]);
  fence_async_shared();
  barriers.put_full(ring);
}
// A tile [64 tokens, 64 values]; `signs` are changed.
template <int kDepth>
FW_DEVICE void put_tokens(RingBarriers<kDepth>& barriers, const Ring<kDepth>& ring, uint32_t buffers,
                          const uint32_t (&b)[4][4], uint32_t signs = 0) {
  barriers.wait_empty(ring);
  const uint32_t to = buffers + ring.slot * kSw128Bytes;
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint32_t x[4] = {b[k][0] ^ signs, b[k][1] ^ signs, b[k][2] ^ signs, b[k][3] ^ signs};
    store_token_fragment(to, k, x);
  }
  fence_async_shared();
  barriers.put_full(ring);
}

// ---- Fine chunk tiles: by the thread that loads stages ------------------------------------------------------------------------------

// Shape: of a stage: kLo and kKeysLo say where it has the lo parts of x (y) and of e (k), the scales lie after the
// chunk tile (kChunkTile): bytes.
template <int kTileK>
FW_DEVICE uint32_t lo_bytes(const HiLoTiles& hi_lo) {
  return static_cast<uint32_t>(sizeof(LoTiles<kTileK>) + (hi_lo.lo_parts != nullptr ? 64 * kTileK * 2 : 0));
}
template <class Shape, int kTileK>
FW_DEVICE void issue_lo_tiles(const HiLoTiles& hi_lo, int64_t tile, char* stage, uint64_t* full) {
  const auto& chunk_tile = static_cast<const LoTiles<kTileK>*>(hi_lo.chunk_tiles)[tile];
  bulk_load(stage + Shape::kLo, chunk_tile.lo, sizeof chunk_tile.lo, full);
  bulk_load(stage + Shape::kChunkTile, chunk_tile.scale, sizeof chunk_tile.scale, full);
  if (hi_lo.lo_parts != nullptr)
    bulk_load(stage + Shape::kKeysLo, hi_lo.lo_parts + tile * (64 * kTileK), 64 * kTileK * 2, full);
}

}  // namespace fw::cuda
