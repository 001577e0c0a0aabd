// What prepare/channel.cu and the prepare of K above 128 (sm90/k256/prepare_keys.cu) share. It is the rows of a
// chunk with their decays, as operands of T and P and in the chunk tiles, and the products of these.
#pragma once

#include <algorithm>

#include "scan/cuda/prepare/channel_parts.cuh"

namespace fw::cuda {

// Shared memory. delta: keys (Khat; becomes x), then w / L and w up to a pair's or half's end, which T, A and P
// overwrite, then e L and r L. Additive: the raw keys, w / L, w up to the ends, r L; P overwrites
// w / L.
// Rows 0 to 31 of the matrix kEnds: tokens 0 to 31 up to the middle; rows 32 to 47 and 48 to 63: tokens 0 to 15 and 32
// to 47 up to the end of their pair of blocks.
struct PrepareChannelTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool is_plain = false;  // raw rows of q and k are the operands, not streams
};

template <PrepareChannelTraits kTraits>
struct ChannelLayout {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kDelta = kTraits.is_delta, kPlain = kTraits.is_plain;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWork = kDelta ? std::max(kTriangle + 2 * kSw128Bytes, 2 * kOperand) : 2 * kOperand;
  static constexpr uint32_t kKeys = 0, kUp = kOperand, kEnds = kUp + kOperand;
  static constexpr uint32_t kT = kUp, kA = kT + kTriangle, kP = kDelta ? kA + kSw128Bytes : kUp;
  static constexpr uint32_t kErase = kUp + kWork, kReads = kDelta ? kErase + kOperand : kErase;
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowScaleCoefs);
  static constexpr uint32_t kBytes = kDecays + sizeof(BlockDecays<kTileK>);
};

// w up to the ends, from w D of a row of the warp.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void store_ends(int r, int warp, const float (&down)[kTileK / 32], const ChannelDecays<kTileK / 32>& d,
                          const BlockDecays<kTileK>& decays, char* shared) {
  constexpr int kN = kTileK / 32;
  char* const to = shared + Layout::kEnds + lane_offset<kN>(r);
  float x[kN];
  if (warp < 4) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = d.far[j] * down[j];
    store_packed(to, pack_channels(x));
  }
  if ((warp & 2) == 0) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = down[j];
    if ((warp & 1) == 0) {
      float near[kN];
      load_floats(decays.bounded[warp + 1] + static_cast<int>(lane_index()) * kN, near);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) x[j] *= near[j];
    }
    store_packed(to + (warp < 4 ? 32 : 16) * 128, pack_channels(x));
  }
}

// exp(G_C - G) (.) w of a row. lasting: what bf16 leaves out of it rests in the memory of the chunk tile x until T and
// P are made.
template <class Layout, class ChunkTile, int kTileK = Layout::kTileK>
FW_DEVICE void store_key(int r, const float (&k)[kTileK / 32], bool lasting, char* shared,
                         const ChunkTiles<kTileK, ChunkTile>& out) {
  constexpr int kN = kTileK / 32;
  const uint32_t at = lane_offset<kN>(r);
  const PackedChannels<kN> packed = pack_channels(k);
  if constexpr (Layout::kDelta) {
    store_packed(shared + Layout::kKeys + at, packed);
    if (lasting) store_packed(reinterpret_cast<char*>(out.solved->x) + at, pack_lo_parts(k, packed));
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, packed);
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, packed);
  }
}

// The streams of a row of the warp: the operands of T and P to shared memory, and with their decays to the chunk tiles.
template <class Layout, RowDecays kDecays, class ChunkTile, int kTileK = Layout::kTileK>
FW_DEVICE void channel_row(int r, int warp, const KeyStreams<kTileK / 32>& s, const float (&alpha)[kTileK / 32],
                           ChannelDecays<kTileK / 32>& d, const BlockDecays<kTileK>& decays, bool lasting, char* shared,
                           const ChunkTiles<kTileK, ChunkTile>& out) {
  constexpr int kN = kTileK / 32;
  const uint32_t at = lane_offset<kN>(r);
  const DecayedRow<kN> row = decayed_row<kDecays>(s, alpha, d);
  store_packed(shared + Layout::kReads + at, pack_channels(row.reads));
  store_packed(shared + Layout::kUp + at, pack_channels(row.up));
  store_ends<Layout>(r, warp, row.down, d, decays, shared);
  const PackedChannels<kN> q_packed = pack_channels(row.q);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (Layout::kDelta) {
    store_packed(shared + Layout::kErase + at, pack_channels(row.erase));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(row.e));
  } else {
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if constexpr (kDecays == RowDecays::kExact) store_key<Layout>(r, row.k, lasting, shared, out);
  sync_warp();  // rows stay apart: with addresses of later ones made ahead there are too few registers
}

// What store_key() has left of a warp's keys, in place of its reads.
template <class Layout, class ChunkTile, int kTileK = Layout::kTileK>
FW_DEVICE void fetch_lo_parts(char* shared, const ChunkTiles<kTileK, ChunkTile>& out) {
  constexpr int kN = kTileK / 32;
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const uint32_t at = lane_offset<kN>(r);
    store_packed(shared + Layout::kReads + at, load_packed<kN>(reinterpret_cast<const char*>(out.solved->x) + at));
  }
  fence_async_global();  // TMA writes x there
}

// The block of 16 rows of T or P that a warp has: the two warps of one scheduler share its work evenly.
FW_DEVICE int pair_block(int warp) { return warp < 4 ? warp : 7 - warp; }

// Adds the products of these channels to the tiles. Additive, warps of the first half have own and near tiles, those of
// the second far ones.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void pair_tiles(uint32_t left, uint32_t up, uint32_t ends, const BlockDecays<kTileK>& decays, int block,
                          int half, PairTiles& c) {
  constexpr bool kDelta = Layout::kDelta;
  const int lane = static_cast<int>(lane_index());
  const bool close = kDelta || half == 0, apart = kDelta || half == 1;
  const float* first = decays.bounded[2 * block] + 2 * (lane & 3);  // channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a step
  FW_NO_UNROLL
  for (int k = 0; k < kTileK / 16; ++k) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    const uint32_t odd[2] = {a[1], a[3]};
    {
      const float2 low = *reinterpret_cast<const float2*>(first + 16 * k),
                   high = *reinterpret_cast<const float2*>(first + 16 * k + 8);
      a[1] = pack_bf16(bf16_low(a[1]) * low.x, bf16_high(a[1]) * low.y);
      a[3] = pack_bf16(bf16_low(a[3]) * high.x, bf16_high(a[3]) * high.y);
    }
    if (close) {
      ldmatrix_x4(b, b_fragment(up, 16 * block, 2 * k));
      mma_bf16(c.own[0], a, b[0], b[1]);
      const uint32_t high[4] = {a[0], odd[0], a[2], odd[1]};
      mma_bf16(c.own[1], high, b[2], b[3]);
      if ((block & 1) != 0) {
        ldmatrix_x4(b, b_fragment(ends, 32 + 8 * (block - 1), 2 * k));
        mma_bf16(c.near[0], a, b[0], b[1]);
        mma_bf16(c.near[1], a, b[2], b[3]);
      }
    }
    if (apart && block >= 2) {
      if (block == 3) {
        const float* middle = decays.bounded[4] + 2 * (lane & 3) + 16 * k;
        const float2 w = *reinterpret_cast<const float2*>(middle), x = *reinterpret_cast<const float2*>(middle + 8);
        const float2 y = *reinterpret_cast<const float2*>(middle + kTileK),
                     z = *reinterpret_cast<const float2*>(middle + kTileK + 8);
        const float f[4] = {w.x * y.x, w.y * y.y, x.x * z.x, x.y * z.y};
        FW_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = pack_bf16(bf16_low(a[i]) * f[i / 2 * 2], bf16_high(a[i]) * f[i / 2 * 2 + 1]);
      }
      FW_UNROLL
      for (int n = 0; n < 4; n += 2) {
        ldmatrix_x4(b, b_fragment(ends, 8 * n, 2 * k));
        mma_bf16(c.far[n], a, b[0], b[1]);
        mma_bf16(c.far[n + 1], a, b[2], b[3]);
      }
    }
  }
}
// Adds to the warp's tiles of T and P what the operands in shared memory give. delta, warps 0 to 3 have the blocks of
// 16 rows of T and 4 to 7 those of P.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void add_channel_pairs(char* shared, int warp, const BlockDecays<kTileK>& decays, PairTiles& c) {
  const int half = warp >> 2;
  const uint32_t base = shared_address(shared),
                 left = base + (Layout::kDelta && half == 0 ? Layout::kErase : Layout::kReads);
  pair_tiles<Layout>(left, base + Layout::kUp, base + Layout::kEnds, decays, pair_block(warp), half, c);
}
// T and P of these, which overwrite operands; no other barrier is wanted before solve().
template <class Layout>
FW_DEVICE void store_channel_pairs(char* shared, int warp, PairTiles& c) {
  constexpr bool kDelta = Layout::kDelta;
  const int half = warp >> 2, block = pair_block(warp);
  clear_above(shared + Layout::kP);
  const TriangleRows triangle = triangle_rows(shared + Layout::kT, block);
  const uint32_t sw128 = sw128_rows(block);
  if (kDelta && half == 0) {
    store_pair_tiles<true>(block, true, true, c, [&](int n, const float(&tile)[4]) { store_tile(triangle, n, tile); });
  } else {
    store_pair_tiles<false>(block, kDelta || half == 0, kDelta || half == 1, c,
                            [&](int n, const float(&tile)[4]) { store_tile(shared + Layout::kP, sw128, n, tile); });
  }
}

}  // namespace fw::cuda
