// What the kernels share that prepare chunks where every key channel has a decay of its own, of any rows. T_ij = sum
// over channels of e_i w_j exp(G_i - G_j), so decays belong to the operands, in blocks of 8 rows (one a warp). Let L be
// the product of a block's decays up to and including a row's own, D that of the rows after a row in its block, and R_b
// that of all of block b. With x_i = e_i L_i (R_b for the odd one of a pair of blocks):
//   within a block                              (e_i L_i) (w_j / L_j)
//   odd block with the even one before it       x_i (w_j / L_j), x with R of the even one
//   between pairs of one half of the chunk      x_i (w_j D_j R ..), up to the pair's end
//   between the two 32s                         x_i R .. (w_j D_j R ..), from and to the middle of the chunk
// Everything but 1 / L is at most 1; for 1 / L, decays of single tokens are bounded from below in T and P
// (kLowestDecay), and nowhere else. All of it are products, never differences of sums: g may be -inf. A row's T and P
// depend on no later decay.
#pragma once

#include "scan/cuda/prepare/finish.cuh"

namespace fw::cuda {

// exp(-10): 1 / L is at most exp(80), and R at least exp(-80).
inline constexpr float kLowestDecay = 4.539993e-5f;

// Products over each of the eight blocks, true and bounded.
template <int kTileK>
struct BlockDecays {
  float total[8][kTileK], bounded[8][kTileK];
};

// exp(g) of this lane's channels of the warp's rows; 1 past the chunk's rows.
template <int kN>
FW_DEVICE void exponentials(float (&g)[kN]) {
  FW_UNROLL
  for (int j = 0; j < kN; ++j) g[j] = exp2_fast(g[j] * kLog2E);
}
template <int kN>
FW_DEVICE void decay_row(const Problem& x, const Rows& rows, const ChunkCoord& coord, int r, float (&alpha)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) alpha[j] = 0;
  if (row < coord.span.rows) load_channels(rows, row, static_cast<int>(lane_index()) * kN, x.K, alpha);
  exponentials(alpha);
}
template <int kN>
FW_DEVICE void decay_rows(const Problem& x, const Rows& rows, const ChunkCoord& coord, float (&alpha)[kWarpRows][kN]) {
  const int channel = static_cast<int>(lane_index()) * kN, first = static_cast<int>(warp_index()) * kWarpRows;
  const int width = rows.bf16 != 0 ? 2 : 4, there = channel < x.K ? coord.span.rows : 0;
  const char* from = rows.data + (first * rows.stride + channel) * width;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) alpha[r][j] = 0;
  }
  if (rows.bf16 != 0) {
    PackedChannels<kN> packed[kWarpRows];
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r)
      packed[r] = first + r < there ? load_packed<kN>(from + r * rows.stride * 2) : PackedChannels<kN>{};
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      FW_UNROLL
      for (int j = 0; j < kN / 2; ++j)
        alpha[r][2 * j] = bf16_low(packed[r].words[j]), alpha[r][2 * j + 1] = bf16_high(packed[r].words[j]);
    }
  } else {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      if (first + r < there) load_floats(reinterpret_cast<const float*>(from + r * rows.stride * 4), alpha[r]);
    }
  }
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) exponentials(alpha[r]);
}

// What a lane carries from row to row of its warp: products of decays, true and bounded.
template <int kN>
struct ChannelDecays {
  float total[kN], before[kN], behind[kN];  // of the warp's rows (bounded); of all blocks before and after
  float bounded[kN], prefix[kN];            // of the warp's rows up to and including the present one
  float far[kN];                            // bounded, of the blocks after in the first half of the chunk
};

// Products over blocks of this lane's channels, and over all.
template <int kTileK>
FW_DEVICE void block_products(const BlockDecays<kTileK>& decays, int warp, ChannelDecays<kTileK / 32>& d,
                              float (&all)[kTileK / 32]) {
  constexpr int kN = kTileK / 32;
  const int channel = static_cast<int>(lane_index()) * kN;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.before[j] = d.behind[j] = all[j] = d.far[j] = 1;
  FW_UNROLL
  for (int block = 0; block < 8; ++block) {
    float x[kN];
    load_floats(decays.total[block] + channel, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      all[j] *= x[j];
      if (block < warp) d.before[j] *= x[j];
      if (block > warp) d.behind[j] *= x[j];
    }
  }
  if (warp < 4) {
    FW_UNROLL
    for (int block = 1; block < 4; ++block) {
      if (block <= warp) continue;
      float x[kN];
      load_floats(decays.bounded[block] + channel, x);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) d.far[j] *= x[j];
    }
  }
}

// After the block's barrier: whether every channel keeps so much of each block's state that X has the keys' lo parts
// too (lasts() in finish.cuh).
template <int kTileK>
FW_DEVICE bool channels_last(const BlockDecays<kTileK>& decays) {
  constexpr int kN = kTileK / 32;
  const float least = exp2_fast(kLastingChunk / 8);
  bool fades = false;
  FW_UNROLL
  for (int block = 0; block < 8; ++block) {
    float x[kN];
    load_floats(decays.total[block] + static_cast<int>(lane_index()) * kN, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) fades = fades || !(x[j] > least);
  }
  return warp_ballot(fades) == 0;
}

// By all threads, after the block's barrier: those, and gamma of the chunk tiles.
template <int kTileK, class ChunkTile>
FW_DEVICE void finish_block_decays(const BlockDecays<kTileK>& decays, int warp, ChannelDecays<kTileK / 32>& d,
                                   const ChunkTiles<kTileK, ChunkTile>& out) {
  constexpr int kN = kTileK / 32;
  const int channel = static_cast<int>(lane_index()) * kN;
  float all[kN];
  block_products(decays, warp, d, all);
  if (warp != 1) return;
  store_floats(out.forward->gamma + channel, all);
  if (out.backward != nullptr) store_floats(out.backward->gamma + channel, all);
}

// Before it: the products over the warp's rows, and d.total. Returns whether no decay of these rows was bounded. alpha:
// those of the rows, where fetched.
template <int kTileK>
FW_DEVICE bool block_decays(const Problem& x, const Rows& tensor, const ChunkCoord& coord, bool fetched, int warp,
                            float (&alpha)[kWarpRows][kTileK / 32], ChannelDecays<kTileK / 32>& d,
                            BlockDecays<kTileK>& decays) {
  constexpr int kN = kTileK / 32;
  const int channel = static_cast<int>(lane_index()) * kN;
  bool exact = true;
  float total[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.bounded[j] = d.prefix[j] = total[j] = 1;
  if (fetched) {
    decay_rows(x, tensor, coord, alpha);
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) total[j] *= alpha[r][j];
    }
  } else {
    FW_NO_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      decay_row(x, tensor, coord, r, alpha[0]);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) total[j] *= alpha[0][j];
    }
  }
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.total[j] = total[j], exact = exact && total[j] >= kLowestDecay;
  exact = warp_ballot(!exact) == 0;
  if (!exact) {  // if a product of decays is small, one of them may be
    exact = true;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d.total[j] = 1;
    FW_NO_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      float row[kN];
      decay_row(x, tensor, coord, r, row);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) d.total[j] *= max(row[j], kLowestDecay), exact = exact && row[j] >= kLowestDecay;
    }
    exact = warp_ballot(!exact) == 0;
  }
  store_floats(decays.total[warp] + channel, total);
  store_floats(decays.bounded[warp] + channel, d.total);
  return exact;
}

// The streams of a row with decays, and what the chunk tiles have of them: r L, e L, w / L and w D; q, -e and Khat.
// RowDecays::kExact: no decay of the warp's rows was bounded, and so L is the product of the true ones, and D times the
// product of the blocks after that of all rows after. Else Khat is that of bounded_keys().
template <int kN>
struct DecayedRow {
  float reads[kN], erase[kN], up[kN], down[kN], q[kN], e[kN], k[kN];
};
template <RowDecays kDecays, int kN>
FW_DEVICE DecayedRow<kN> decayed_row(const KeyStreams<kN>& s, const float (&alpha)[kN], ChannelDecays<kN>& d) {
  constexpr bool kExact = kDecays == RowDecays::kExact;
  DecayedRow<kN> row;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    d.bounded[j] *= kExact ? alpha[j] : max(alpha[j], kLowestDecay);
    const float inverse = rcp_fast(d.bounded[j]);
    row.reads[j] = d.bounded[j] * s.r[j], row.erase[j] = d.bounded[j] * s.e[j];
    row.up[j] = inverse * s.w[j], row.down[j] = d.total[j] * row.up[j];
    if constexpr (kExact) {
      row.q[j] = d.before[j] * row.reads[j], row.e[j] = -(d.before[j] * row.erase[j]),
      row.k[j] = d.behind[j] * row.down[j];
    } else {
      d.prefix[j] *= alpha[j];
      const float gamma = d.before[j] * d.prefix[j];
      row.q[j] = gamma * s.r[j], row.e[j] = -gamma * s.e[j];
    }
  }
  return row;
}

// Khat = exp(G_C - G) (.) w of the warp's rows by products from the last row on, where a decay was bounded: store(r,
// k).
template <int kN, class Store>
FW_DEVICE void bounded_keys(const Problem& x, const Rows& decays, const ChunkCoord& coord, const RowScaleCoefs* coefs,
                            const float (&behind)[kN], Store&& store) {
  const FrontRows rows = front_rows(x, coord.n, coord.hv);
  float suffix[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) suffix[j] = behind[j];
  FW_NO_UNROLL
  for (int r = kWarpRows - 1; r >= 0; --r) {
    const RawKeyRow<kN> row = row_from_memory<kN>(x, rows, coord, r);
    float alpha[kN], k[kN];
    decay_row(x, decays, coord, r, alpha);
    const float w_k = coefs[static_cast<int>(warp_index()) * kWarpRows + r].lo.y;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      k[j] = suffix[j] * ((x.rule.preconditions_read() ? 1.0f : row.m[j]) * (w_k * row.k[j]));
      suffix[j] *= alpha[j];
    }
    store(r, k);
  }
}

// Tiles of 8 columns of the 16 rows of pair `block` of blocks. own: the columns of the pair; near: those of the pair
// before, of an odd pair; far: the first half of the chunk, of a pair of the second.
struct PairTiles {
  float own[2][4], near[2][4], far[4][4];
};
FW_DEVICE void clear_pair_tiles(PairTiles& c) {
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    c.own[0][i] = c.own[1][i] = c.near[0][i] = c.near[1][i] = 0;
    FW_UNROLL
    for (int n = 0; n < 4; ++n) c.far[n][i] = 0;
  }
}
// store(number of the tile in the row of tiles, tile), cut at the diagonal (kStrict: with it). close, apart: the tiles
// of one half or of both are there.
template <bool kStrict, class Store>
FW_DEVICE void store_pair_tiles(int block, bool close, bool apart, PairTiles& c, Store&& store) {
  FW_UNROLL
  for (int n = 0; n < 2; ++n) {
    if (close) {
      cut_tile<kStrict>(n, c.own[n]);
      store(2 * block + n, c.own[n]);
      if ((block & 1) != 0) store(2 * block - 2 + n, c.near[n]);
    }
    if (apart && block >= 2) store(n, c.far[n]), store(n + 2, c.far[n + 2]);
  }
}

}  // namespace fw::cuda
