// prepare where every key channel has a decay of its own. T_ij = sum over channels of e_i w_j exp(G_i - G_j), so decays belong to
// the operands, in blocks of 8 rows (one a warp). With L the product of a block's decays up to and including a row's own, D that of
// the rows behind a row in its block, R_b that of all of block b, and x_i = e_i L_i (R_b for the odd one of a pair of blocks):
//   within a block                              (e_i L_i) (w_j / L_j)
//   odd block with the even one before it       x_i (w_j / L_j), x with R of the even one
//   between pairs of one half of the chunk      x_i (w_j D_j R ..), up to the pair's end
//   between the halves                          x_i R .. (w_j D_j R ..), from and to the middle of the chunk
// Everything but 1 / L is at most 1; for 1 / L, decays of single tokens are bounded from below in T and P (kLowestDecay), and
// nowhere else. All of it are products, never differences of sums: g may be -inf. A row's T and P depend on no later decay.
#include <algorithm>

#include "scan/cuda/device/prepare_finish.cuh"
#include "scan/cuda/launch.h"
#include "scan/cuda/prepare_kernels.h"

namespace fw::cuda {
namespace {

// exp(-10): 1 / L is at most exp(80), and R at least exp(-80).
inline constexpr float kLowestDecay = 4.539993e-5f;

// Products over each of the eight blocks, true and bounded.
template <int kKey>
struct BlockDecays {
  float total[8][kKey], bounded[8][kKey];
};

// Shared memory. Online: keys (Khat; becomes x), then w / L and w up to a pair's or half's end, whose place T, A and P take, then e L and
// r L, whose place -E and Q take where the backward image is wanted. Offline: the raw keys, w / L, w up to the ends, r L; P takes the place
// of w / L.
// Rows 0 to 31 of the matrix kEnds: tokens 0 to 31 up to the middle; rows 32 to 47 and 48 to 63: tokens 0 to 15 and 32 to 47 up to the end
// of their pair of blocks.
template <int kKey, bool kOnline>
struct ChannelLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWork = kOnline ? std::max(kTriangle + 2 * kPanelBytes, 2 * kOperand) : 2 * kOperand;
  static constexpr uint32_t kKeys = 0, kUp = kOperand, kEnds = kUp + kOperand;
  static constexpr uint32_t kT = kUp, kA = kT + kTriangle, kP = kOnline ? kA + kPanelBytes : kUp;
  static constexpr uint32_t kErase = kUp + kWork, kReads = kOnline ? kErase + kOperand : kErase;
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static constexpr uint32_t kBytes = kDecays + sizeof(BlockDecays<kKey>);
};

// exp(g) of this lane's channels of the warp's rows; 1 past the chunk's rows.
template <int kN>
FW_DEVICE void exponentials(float (&g)[kN]) {
  FW_UNROLL
  for (int j = 0; j < kN; ++j) g[j] = exp2_fast(g[j] * kLog2E);
}
template <int kN>
FW_DEVICE void decay_row(const Problem& x, const Rows& rows, const ChunkPlace& place, int r, float (&alpha)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) alpha[j] = 0;
  if (row < place.span.rows) load_channels(rows, row, static_cast<int>(lane_index()) * kN, x.K, alpha);
  exponentials(alpha);
}
template <int kN>
FW_DEVICE void decay_rows(const Rows& rows, const ChunkPlace& place, float (&alpha)[kWarpRows][kN]) {
  const int channel = static_cast<int>(lane_index()) * kN, first = static_cast<int>(warp_index()) * kWarpRows;
  const int width = rows.bf16 != 0 ? 2 : 4;
  const char* from = rows.data + (first * rows.stride + channel) * width;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) alpha[r][j] = 0;
  }
  if (rows.bf16 != 0) {
    PackedChannels<kN> packed[kWarpRows];
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) packed[r] = first + r < place.span.rows ? load_packed<kN>(from + r * rows.stride * 2) : PackedChannels<kN>{};
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      FW_UNROLL
      for (int j = 0; j < kN / 2; ++j) alpha[r][2 * j] = bf16_low(packed[r].words[j]), alpha[r][2 * j + 1] = bf16_high(packed[r].words[j]);
    }
  } else {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      if (first + r < place.span.rows) load_floats(reinterpret_cast<const float*>(from + r * rows.stride * 4), alpha[r]);
    }
  }
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) exponentials(alpha[r]);
}

// What a lane carries from row to row of its warp: products of decays, true and bounded.
template <int kN>
struct ChannelDecays {
  float total[kN], before[kN], behind[kN];  // of the warp's rows (bounded); of all blocks before and behind
  float bounded[kN], prefix[kN];            // of the warp's rows up to and including the present one
  float far[kN];                            // bounded, of the blocks behind in the first half of the chunk
};

// Products over blocks of this lane's channels, and over all.
template <int kKey>
FW_DEVICE void block_products(const BlockDecays<kKey>& decays, int warp, ChannelDecays<kKey / 32>& d, float (&all)[kKey / 32]) {
  constexpr int kN = kKey / 32;
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

// w up to the ends, from w D of a row of the warp.
template <int kKey, bool kOnline>
FW_DEVICE void store_ends(int r, int warp, const float (&down)[kKey / 32], const ChannelDecays<kKey / 32>& d, const BlockDecays<kKey>& decays, char* shared) {
  constexpr int kN = kKey / 32;
  char* const to = shared + ChannelLayout<kKey, kOnline>::kEnds + lane_offset<kN>(r);
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

// exp(G_C - G) (.) w of a row.
template <int kKey, bool kOnline>
FW_DEVICE void store_key(int r, const float (&k)[kKey / 32], char* shared, const ChunkImages<kKey>& out) {
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  const PackedChannels<kN> packed = pack_channels(k);
  if constexpr (kOnline) {
    store_packed(shared + ChannelLayout<kKey, kOnline>::kKeys + at, packed);
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, packed);
  }
  if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, packed);
}

// The streams of a row of the warp: the operands of T and P to shared memory, and with their decays to the images. kExact: no decay of
// the warp's rows was bounded, and so L is the product of the true ones, and D times the product of the blocks behind that of all rows
// behind.
template <int kKey, bool kOnline, bool kExact>
FW_DEVICE void channel_row(int r, int warp, const KeyStreams<kKey / 32>& s, const float (&alpha)[kKey / 32], ChannelDecays<kKey / 32>& d,
                           const BlockDecays<kKey>& decays, char* shared, const ChunkImages<kKey>& out) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  float q[kN], e[kN], reads[kN], erase[kN], up[kN], down[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    d.bounded[j] *= kExact ? alpha[j] : max(alpha[j], kLowestDecay);
    const float inverse = rcp_fast(d.bounded[j]);
    reads[j] = d.bounded[j] * s.r[j], erase[j] = d.bounded[j] * s.e[j];
    up[j] = inverse * s.w[j], down[j] = d.total[j] * up[j];
    if constexpr (kExact) {
      q[j] = d.before[j] * reads[j], e[j] = -(d.before[j] * erase[j]), k[j] = d.behind[j] * down[j];
    } else {
      d.prefix[j] *= alpha[j];
      const float gamma = d.before[j] * d.prefix[j];
      q[j] = gamma * s.r[j], e[j] = -gamma * s.e[j];
    }
  }
  store_packed(shared + Layout::kReads + at, pack_channels(reads));
  store_packed(shared + Layout::kUp + at, pack_channels(up));
  store_ends<kKey, kOnline>(r, warp, down, d, decays, shared);
  const PackedChannels<kN> q_packed = pack_channels(q);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    store_packed(shared + Layout::kErase + at, pack_channels(erase));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(e));
  } else {
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if constexpr (kExact) store_key<kKey, kOnline>(r, k, shared, out);
  sync_warp();  // rows stay apart: with addresses of later ones made ahead there are too few registers
}

// Khat of the warp's rows by products from the last row on, where a decay was bounded.
template <int kKey, bool kOnline>
FW_DEVICE void bounded_keys(const Problem& x, const Rows& decays, const ChunkPlace& place, const RowCoefs* coefs, const float (&behind)[kKey / 32],
                            char* shared, const ChunkImages<kKey>& out) {
  const FrontRows rows = front_rows(x, place.n, place.hv);
  constexpr int kN = kKey / 32;
  float suffix[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) suffix[j] = behind[j];
  FW_NO_UNROLL
  for (int r = kWarpRows - 1; r >= 0; --r) {
    const RawKeyRow<kN> row = row_from_memory<kN>(x, rows, place, r);
    float alpha[kN], k[kN];
    decay_row(x, decays, place, r, alpha);
    const float w_k = coefs[static_cast<int>(warp_index()) * kWarpRows + r].rest.y;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      k[j] = suffix[j] * ((x.rule.preconditions_read() ? 1.0f : row.m[j]) * (w_k * row.k[j]));
      suffix[j] *= alpha[j];
    }
    store_key<kKey, kOnline>(r, k, shared, out);
  }
}

// Tiles of 8 columns of the 16 rows of pair `block` of blocks. own: the columns of the pair; near: those of the pair before, of an odd pair; far: the
// first half of the chunk, of a pair of the second. Offline, warps of the first half have own and near, those of the second far.
struct PairTiles {
  float own[2][4], near[2][4], far[4][4];
};
template <int kKey, bool kOnline>
FW_DEVICE void pair_tiles(uint32_t left, uint32_t up, uint32_t ends, const BlockDecays<kKey>& decays, int block, int half, PairTiles& c) {
  const int lane = static_cast<int>(lane_index());
  const bool close = kOnline || half == 0, apart = kOnline || half == 1;
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    c.own[0][i] = c.own[1][i] = c.near[0][i] = c.near[1][i] = 0;
    FW_UNROLL
    for (int n = 0; n < 4; ++n) c.far[n][i] = 0;
  }
  const float* first = decays.bounded[2 * block] + 2 * (lane & 3);  // channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a step
  FW_NO_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    const uint32_t odd[2] = {a[1], a[3]};
    {
      const float2 low = *reinterpret_cast<const float2*>(first + 16 * k), high = *reinterpret_cast<const float2*>(first + 16 * k + 8);
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
        const float2 y = *reinterpret_cast<const float2*>(middle + kKey), z = *reinterpret_cast<const float2*>(middle + kKey + 8);
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

// T and P. Online, warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P.
template <int kKey, bool kOnline>
FW_DEVICE void channel_pairs(char* shared, int warp, const BlockDecays<kKey>& decays) {
  using Layout = ChannelLayout<kKey, kOnline>;
  const int half = warp >> 2, block = half == 0 ? warp : 7 - warp;  // the two warps of one scheduler share its work evenly
  const bool strict = kOnline && half == 0;
  const uint32_t base = shared_address(shared), left = base + (strict ? Layout::kErase : Layout::kReads);
  PairTiles c;
  pair_tiles<kKey, kOnline>(left, base + Layout::kUp, base + Layout::kEnds, decays, block, half, c);
  sync_threads();  // T and P take the place of operands
  clear_above(shared + Layout::kP);
  const TriangleRows triangle = triangle_rows(shared + Layout::kT, block);
  const uint32_t panel = panel_rows(block);
  const auto store = [&](int n, const float(&tile)[4]) {
    if (strict) {
      store_tile(triangle, n, tile);
    } else {
      store_tile(shared + Layout::kP, panel, n, tile);
    }
  };
  FW_UNROLL
  for (int n = 0; n < 2; ++n) {
    if (kOnline || half == 0) {
      if (strict) {
        cut_tile<true>(n, c.own[n]);
      } else {
        cut_tile<false>(n, c.own[n]);
      }
      store(2 * block + n, c.own[n]);
      if ((block & 1) != 0) store(2 * block - 2 + n, c.near[n]);
    }
    if ((kOnline || half == 1) && block >= 2) store(n, c.far[n]), store(n + 2, c.far[n + 2]);
  }
}

template <int kKey, bool kOnline, bool kPlain>
__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  const bool fetched = kPlain || fetched_flag != 0;
  char* shared = shared_memory();
  RowCoefs* coefs = reinterpret_cast<RowCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kKey>& decays = *reinterpret_cast<BlockDecays<kKey>*>(shared + Layout::kDecays);
  const ChunkPlace place = chunk_place(x);
  if (place.span.rows < 0) return;
  const ChunkImages<kKey> out = chunk_images<kKey>(args, place.item);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp(), lane = static_cast<int>(lane_index()), channel = lane * kN;

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  const Rows decay_tensor = chunk_rows(x.in.g, place);
  if (fetched) fetch_front<kN>(x, place, raw);
  const int coefficients_of = kPlain ? coefficient_row(warp) : -1;
  const PlainGates gates = plain_gates(x, place, coefficients_of);

  float alpha[kWarpRows][kN];
  ChannelDecays<kN> d;
  bool exact = true;
  {
    float total[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d.bounded[j] = d.prefix[j] = total[j] = 1;
    if (fetched) {
      decay_rows(decay_tensor, place, alpha);
      FW_UNROLL
      for (int r = 0; r < kWarpRows; ++r) {
        FW_UNROLL
        for (int j = 0; j < kN; ++j) total[j] *= alpha[r][j];
      }
    } else {
      FW_NO_UNROLL
      for (int r = 0; r < kWarpRows; ++r) {
        decay_row(x, decay_tensor, place, r, alpha[0]);
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
        decay_row(x, decay_tensor, place, r, row);
        FW_UNROLL
        for (int j = 0; j < kN; ++j) d.total[j] *= max(row[j], kLowestDecay), exact = exact && row[j] >= kLowestDecay;
      }
      exact = warp_ballot(!exact) == 0;
    }
    store_floats(decays.total[warp] + channel, total);
    store_floats(decays.bounded[warp] + channel, d.total);
  }
  if constexpr (kPlain) {
    front_arrived();
    if (uses_norms(x.rule)) {
      const float2 squares = fetched_squares<kN>(raw);
      if (lane % 4 == 0) coefs[warp * kWarpRows + lane / 4].read_erase = make_float4(squares.x, squares.y, 0, 0);
    }
  } else {
    make_coefs<kN>(x, place, fetched, raw, coefs);
  }
  sync_threads();
  {
    float all[kN];
    block_products(decays, warp, d, all);
    if (warp == 1) {
      store_floats(out.forward->gamma + channel, all);
      if (out.backward != nullptr) store_floats(out.backward->gamma + channel, all);
    }
  }
  if constexpr (kPlain) {
    if (coefficients_of >= 0) {
      const float4 norms = coefs[coefficients_of].read_erase;
      const FrontCoefs<float> c = plain_coefs(x, gates, norms.x, norms.y);
      const bool valid = coefficients_of < place.span.rows;
      coefs[coefficients_of].read_erase = valid ? make_float4(c.r_q, 0, c.e_k, 0) : make_float4(0, 0, 0, 0);
      coefs[coefficients_of].rest = valid ? make_float4(0, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
    }
    sync_threads();
  }
  if (thread < kChunk) out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].rest.z : thread < place.span.rows ? 1.0f : 0.0f;
  if (fetched && exact) {
    for_each_fetched_row<kN, kPlain>(x, place, raw, coefs,
                                     [&](int r, const KeyStreams<kN>& s) { channel_row<kKey, kOnline, true>(r, warp, s, alpha[r], d, decays, shared, out); });
  } else {
    for_each_row<kN>(x, place, coefs, [&](int r, const KeyStreams<kN>& s) {
      float row[kN];
      decay_row(x, decay_tensor, place, r, row);
      channel_row<kKey, kOnline, false>(r, warp, s, row, d, decays, shared, out);
    });
    bounded_keys<kKey, kOnline>(x, decay_tensor, place, coefs, d.behind, shared, out);
  }
  sync_threads();
  channel_pairs<kKey, kOnline>(shared, warp, decays);

  const auto z_of = [&](int row) { return coefs[row].rest.z; };
  if constexpr (kOnline) {
    const FinishBuffers buffers{shared + Layout::kKeys,
                                shared + Layout::kT,
                                shared + Layout::kA,
                                shared + Layout::kP,
                                shared + Layout::kT,
                                shared + Layout::kErase,
                                shared + Layout::kReads,
                                shared + Layout::kErase,
                                nullptr,
                                nullptr,
                                nullptr};
    finish_online<kKey, RowForm::kStreams, true, false, false>(
        buffers, warp, out, [](int) {},
        [&](int number) {
          const int other = number * 32 + lane;
          if (out.backward != nullptr) {  // -E and Q as this block wrote them
            for (uint32_t i = static_cast<uint32_t>(other) * 16; i < Layout::kOperand; i += kMeanwhileWarps * 32 * 16) {
              cp_async_16(shared_address(shared + Layout::kErase + i), reinterpret_cast<const char*>(out.forward->e) + i, true);
              cp_async_16(shared_address(shared + Layout::kReads + i), reinterpret_cast<const char*>(out.forward->q) + i, true);
            }
            cp_async_commit();
          }
          if (out.z != nullptr) write_values(x, place, z_of, out.z, other, kMeanwhileWarps * 32);
          cp_async_wait<0>();
        });
  } else {
    start_offline<kKey>(shared + Layout::kP, out);
    if (out.z != nullptr) write_values(x, place, z_of, out.z, thread, kPrepareThreads);
    finish_offline();
  }
}

template <int kKey, bool kOnline>
void launch_channel(const PrepareArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const bool fetched = can_fetch(x, kKey);
  launch(fetched && plain_streams(x) ? prepare_channel_kernel<kKey, kOnline, true> : prepare_channel_kernel<kKey, kOnline, false>, prepare_grid(x, chunks),
         kPrepareThreads, ChannelLayout<kKey, kOnline>::kBytes, stream, args, static_cast<int>(fetched));
}

}  // namespace

void prepare_channel(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  if (prepare_channel_takes_plain(args, key)) return prepare_channel_plain(args, key, chunks, stream);
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_channel<128, true>(args, chunks, stream) : launch_channel<128, false>(args, chunks, stream);
  } else {
    online ? launch_channel<64, true>(args, chunks, stream) : launch_channel<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
