// prepare where every key channel has a decay of its own. T_ij = sum over channels of e_i w_j exp(G_i - G_j), so decays belong to
// the operands, in blocks of 8 rows (one a warp). With L the product of a block's decays up to and including a row's own, R_b that of
// all of block b, and x_i = e_i L_i, times R of the even one for rows of the odd one of a pair of blocks:
//   within a block                              (e_i L_i) (w_j / L_j)
//   odd block with the even one before it       x_i (w_j / L_j)
//   pairs of blocks, columns of a block b       (x_i R_b R .. up to the start of i's pair) (w_j / L_j)
// The operands in memory are e L, r L and w / L; the other factors are multiplied to fragments of the left one, in bf16.
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
// In the place of those, once they are read: bounded products over several blocks as bf16 factors of fragments of the left operand, for a lane
// of quad t in step k of 16 channels. x, y: rows of the even block of a pair, channels 2 t and the next, and 8 more; z, w: rows of the odd one, with
// R of the even one.
template <int kKey>
struct FragmentFactors {
  static constexpr int kTiles = 12;
  uint4 tile[kTiles][kKey / 16][4];  // tiles of 8 columns before a pair's own: 2 of pair 1, 4 of pair 2, 6 of pair 3
  uint2 odd[4][kKey / 16][4];        // of each pair's odd rows for its even columns: R of the even block
  static FW_DEVICE int first(int pair) { return pair * (pair - 1); }
};

// What a block knows of itself, from memory once the rows are through: there are no registers for it before.
template <int kKey>
struct BlockNotes {
  ChunkPlace place;
  ChunkImages<kKey> out;
};

// Shared memory. Online: keys (Khat; becomes x), w / L, e L, r L. T takes the place of w / L, P and A that of e L. Where the backward image
// is wanted, Q takes the place of r L, and -E that of T once A is there. Offline: the raw keys, w / L, r L; P takes the place of w / L.
template <int kKey, bool kOnline>
struct ChannelLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeys = 0, kUp = kOperand, kT = kUp, kErase = kUp + (kOnline ? std::max(kOperand, kTriangle) : kOperand);
  static constexpr uint32_t kA = kErase + kPanelBytes, kP = kOnline ? kErase : kUp, kMinusE = kT;
  static constexpr uint32_t kReads = kErase + (kOnline ? std::max<uint32_t>(kOperand, 2 * kPanelBytes) : 0);
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static_assert(sizeof(FragmentFactors<kKey>) <= sizeof(BlockDecays<kKey>));
  static constexpr uint32_t kNotes = kDecays + sizeof(BlockDecays<kKey>), kBytes = kNotes + 128;
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

// What a lane carries from row to row of its warp: products of decays.
template <int kN>
struct ChannelDecays {
  float before[kN], behind[kN];  // of all blocks before; of all behind, if exact with the warp's own
  float bounded[kN];             // of the warp's rows up to and including the present one
};

// Products over blocks of this lane's channels. own: behind with the warp's own.
template <int kKey>
FW_DEVICE void block_products(const BlockDecays<kKey>& decays, int warp, bool own, ChannelDecays<kKey / 32>& d) {
  constexpr int kN = kKey / 32;
  const float* from = decays.total[0] + static_cast<int>(lane_index()) * kN;
  const int first = own ? warp : warp + 1;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.before[j] = d.behind[j] = 1;
  FW_UNROLL
  for (int block = 0; block < 8; ++block) {
    float x[kN];
    load_floats(from + block * kKey, x);
    if (block < warp) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) d.before[j] *= x[j];
    }
    if (block >= first) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) d.behind[j] *= x[j];
    }
  }
}

// The factors of two channels for one pair of blocks: a thread has channels 2 p and the next, p = thread % (kKey / 2), and the pair thread / (kKey / 2), if
// there is one. Made while the products are in their place, stored when nobody reads those any more.
template <int kKey>
struct FactorWords {
  static constexpr int kPairs = kKey / 2;
  uint32_t even[6], odd[6], own;
  FW_DEVICE void make(const BlockDecays<kKey>& decays, int thread) {
    const int pair = thread / kPairs;
    if (pair >= 4) return;
    const float* from = decays.bounded[0] + 2 * (thread % kPairs);
    const float2 r = *reinterpret_cast<const float2*>(from + 2 * pair * kKey);
    float2 x = make_float2(1, 1);
    own = pack_bf16(r.x, r.y);
    FW_UNROLL
    for (int i = 0; i < 6; ++i) {  // tile 2 pair - 1 - i
      const int block = 2 * pair - 1 - i;
      if (block < 0) break;
      const float2 y = *reinterpret_cast<const float2*>(from + block * kKey);
      x.x *= y.x, x.y *= y.y;
      even[i] = pack_bf16(x.x, x.y), odd[i] = pack_bf16(r.x * x.x, r.y * x.y);
    }
  }
  FW_DEVICE void store(FragmentFactors<kKey>& factors, int thread) const {
    const int pair = thread / kPairs, p = thread % kPairs, k = p >> 3, high = (p >> 2) & 1, t = p & 3;
    if (pair >= 4) return;
    reinterpret_cast<uint32_t*>(&factors.odd[pair][k][t])[high] = own;
    const int last = FragmentFactors<kKey>::first(pair) + 2 * pair - 1;
    FW_UNROLL
    for (int i = 0; i < 6; ++i) {
      if (2 * pair - 1 - i < 0) break;
      uint32_t* to = reinterpret_cast<uint32_t*>(&factors.tile[last - i][k][t]) + high;
      to[0] = even[i], to[2] = odd[i];
    }
  }
};

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
// the warp's rows was bounded, and so L is the product of the true ones; else `prefix` is that.
template <int kKey, bool kOnline, bool kExact>
FW_DEVICE void channel_row(int r, const KeyStreams<kKey / 32>& s, const float (&alpha)[kKey / 32], ChannelDecays<kKey / 32>& d, float (&prefix)[kKey / 32],
                           char* shared, const ChunkImages<kKey>& out) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  float q[kN], e[kN], reads[kN], erase[kN], up[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    d.bounded[j] *= kExact ? alpha[j] : max(alpha[j], kLowestDecay);
    reads[j] = d.bounded[j] * s.r[j], erase[j] = d.bounded[j] * s.e[j], up[j] = rcp_fast(d.bounded[j]) * s.w[j];
    if constexpr (kExact) {
      q[j] = d.before[j] * reads[j], e[j] = -(d.before[j] * erase[j]), k[j] = d.behind[j] * up[j];
    } else {
      prefix[j] *= alpha[j];
      const float gamma = d.before[j] * prefix[j];
      q[j] = gamma * s.r[j], e[j] = -gamma * s.e[j];
    }
  }
  store_packed(shared + Layout::kReads + at, pack_channels(reads));
  store_packed(shared + Layout::kUp + at, pack_channels(up));
  const PackedChannels<kN> q_packed = pack_channels(q);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    store_packed(shared + Layout::kErase + at, pack_channels(erase));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(e));
  } else {
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if constexpr (kExact) store_key<kKey, kOnline>(r, k, shared, out);
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

// Tiles of 8 columns of the 16 rows of pair work.block of blocks. own: the columns of the pair; near: those of the pair before, of an odd
// pair; far: the first half of the chunk, of a pair of the second.
struct PairTiles {
  float own[2][4], near[2][4], far[4][4];
};
template <int kKey, bool kOnline>
FW_DEVICE void pair_tiles(const PairWork<kOnline>& work, uint32_t left, uint32_t right, const FragmentFactors<kKey>& factors, PairTiles& c) {
  const int block = work.block, t = static_cast<int>(lane_index()) & 3;
  const bool own = work.has(block), near = (block & 1) != 0 && work.has(block - 1);
  const uint4(*const tiles)[kKey / 16][4] = factors.tile + FragmentFactors<kKey>::first(block);
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    c.own[0][i] = c.own[1][i] = c.near[0][i] = c.near[1][i] = 0;
    FW_UNROLL
    for (int n = 0; n < 4; ++n) c.far[n][i] = 0;
  }
  const auto add = [&](const uint32_t(&a)[4], int k, int n, float(&tile)[4], uint32_t b0, uint32_t b1) {
    const uint4 f = tiles[n][k][t];
    const uint32_t x[4] = {mul_bf16x2(a[0], f.x), mul_bf16x2(a[1], f.z), mul_bf16x2(a[2], f.y), mul_bf16x2(a[3], f.w)};
    mma_bf16(tile, x, b0, b1);
  };
  FW_NO_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    if (own) {
      ldmatrix_x4(b, b_fragment(right, 16 * block, 2 * k));
      const uint2 f = factors.odd[block][k][t];
      const uint32_t x[4] = {a[0], mul_bf16x2(a[1], f.x), a[2], mul_bf16x2(a[3], f.y)};
      mma_bf16(c.own[0], x, b[0], b[1]);
      mma_bf16(c.own[1], a, b[2], b[3]);
    }
    if (near) {
      ldmatrix_x4(b, b_fragment(right, 16 * block - 16, 2 * k));
      add(a, k, 2 * block - 2, c.near[0], b[0], b[1]);
      add(a, k, 2 * block - 1, c.near[1], b[2], b[3]);
    }
    if (block >= 2) {
      FW_UNROLL
      for (int n = 0; n < 4; n += 2) {
        if (!work.has(n / 2)) continue;
        ldmatrix_x4(b, b_fragment(right, 8 * n, 2 * k));
        add(a, k, n, c.far[n], b[0], b[1]);
        add(a, k, n + 1, c.far[n + 1], b[2], b[3]);
      }
    }
  }
}

// T and P.
template <int kKey, bool kOnline>
FW_DEVICE void channel_pairs(char* shared, int warp) {
  using Layout = ChannelLayout<kKey, kOnline>;
  const PairWork<kOnline> work(warp);
  const int block = work.block;
  const uint32_t base = shared_address(shared), left = base + (work.strict ? Layout::kErase : Layout::kReads);
  PairTiles c;
  pair_tiles<kKey, kOnline>(work, left, base + Layout::kUp, *reinterpret_cast<const FragmentFactors<kKey>*>(shared + Layout::kDecays), c);
  sync_threads();  // T and P take the place of operands
  clear_above(shared + Layout::kP);
  const TriangleRows triangle = triangle_rows(shared + Layout::kT, block);
  const uint32_t panel = panel_rows(block);
  const auto store = [&](int n, const float(&tile)[4]) {
    if (work.strict) {
      store_tile(triangle, n, tile);
    } else {
      store_tile(shared + Layout::kP, panel, n, tile);
    }
  };
  FW_UNROLL
  for (int n = 0; n < 2; ++n) {
    if (work.has(block)) {
      if (work.strict) {
        cut_tile<true>(n, c.own[n]);
      } else {
        cut_tile<false>(n, c.own[n]);
      }
      store(2 * block + n, c.own[n]);
    }
    if ((block & 1) != 0 && work.has(block - 1)) store(2 * block - 2 + n, c.near[n]);
    if (block >= 2 && work.has(n)) store(2 * n, c.far[2 * n]), store(2 * n + 1, c.far[2 * n + 1]);
  }
}

// The second half, from T and P to the images' x, m, y and q: as finish_online(), with less room. M goes to memory from registers.
template <int kKey, class Values>
FW_DEVICE void finish_channel(char* shared, int warp, const ChunkImages<kKey>& out, Values&& write_z) {
  using Layout = ChannelLayout<kKey, true>;
  const uint32_t base = shared_address(shared), thread = thread_index();
  const bool backward = out.backward != nullptr;
  if (warp < 4) invert<false>(reinterpret_cast<float*>(shared + Layout::kT), shared + Layout::kA, nullptr, warp, [] {});
  if (warp >= 4 || warp % 2 == 0) {
    const int other = (warp >= 4 ? warp - 4 : 4 + warp / 2) * 32 + static_cast<int>(lane_index());
    if (backward) {  // Q and -E as this block wrote them
      for (uint32_t i = static_cast<uint32_t>(other) * 16; i < Layout::kOperand; i += kMeanwhileWarps * 32 * 16)
        cp_async_16(base + Layout::kReads + i, reinterpret_cast<const char*>(out.forward->q) + i, true);
      cp_async_commit();
    }
    write_z(other, kMeanwhileWarps * 32);
  }
  sync_threads();
  if (backward) {
    for (uint32_t i = thread * 16; i < Layout::kOperand; i += kPrepareThreads * 16)
      cp_async_16(base + Layout::kMinusE + i, reinterpret_cast<const char*>(out.forward->e) + i, true);
    cp_async_commit();
  }
  const SplitPanel a{base + Layout::kA, 0}, p{base + Layout::kP, 0};
  if (warp < kKey / 16) transform_keys<false, false>(base + Layout::kKeys, nullptr, a, warp);
  read_products<false>(p, a, reinterpret_cast<char*>(out.forward->m), warp);
  if (backward) {
    cp_async_wait<0>();
    sync_threads();
    if (warp < kKey / 16) {
      const ReadBuffers reads{base + Layout::kMinusE, base + Layout::kReads, base + Layout::kMinusE, nullptr, nullptr};
      transform_reads<false, false>(reads, a, p.high, warp);
    }
  }
  fence_async_shared();
  sync_threads();
  if (thread == 0) {
    bulk_store(out.forward->x, shared + Layout::kKeys, sizeof out.forward->x);
    if (backward) {
      bulk_store(out.backward->y, shared + Layout::kMinusE, sizeof out.backward->y);
      bulk_store(out.backward->q, shared + Layout::kReads, sizeof out.backward->q);
    }
    if (out.pairs != nullptr) {
      bulk_store(out.pairs->a, shared + Layout::kA, kPanelBytes);
      bulk_store(out.pairs->p, shared + Layout::kP, kPanelBytes);
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
}

template <int kKey, bool kOnline, bool kPlain>
__global__ void __launch_bounds__(kPrepareThreads, kPlain ? 3 : 2) prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag) {
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
  BlockNotes<kKey>& notes = *reinterpret_cast<BlockNotes<kKey>*>(shared + Layout::kNotes);
  static_assert(sizeof notes <= 128);
  if (thread == 0) notes = {place, out};

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
    for (int j = 0; j < kN; ++j) total[j] = 1;
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
    float least[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) least[j] = total[j], exact = exact && total[j] >= kLowestDecay;
    exact = warp_ballot(!exact) == 0;
    if (!exact) {  // if a product of decays is small, one of them may be
      exact = true;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) least[j] = 1;
      FW_NO_UNROLL
      for (int r = 0; r < kWarpRows; ++r) {
        float row[kN];
        decay_row(x, decay_tensor, place, r, row);
        FW_UNROLL
        for (int j = 0; j < kN; ++j) least[j] *= max(row[j], kLowestDecay), exact = exact && row[j] >= kLowestDecay;
      }
      exact = warp_ballot(!exact) == 0;
    }
    store_floats(decays.total[warp] + channel, total);
    store_floats(decays.bounded[warp] + channel, least);
  }
  const bool fast = fetched && exact;
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
  block_products(decays, warp, fast, d);
  if (warp == 1) {
    float gamma[kN], x[kN];
    load_floats(decays.total[1] + channel, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) gamma[j] = d.before[j] * d.behind[j] * (fast ? 1.0f : x[j]);
    store_floats(out.forward->gamma + channel, gamma);
    if (out.backward != nullptr) store_floats(out.backward->gamma + channel, gamma);
  }
  if constexpr (kPlain) {
    if (coefficients_of >= 0) {
      const float4 norms = coefs[coefficients_of].read_erase;
      const FrontCoefs<float> c = plain_coefs(x, gates, norms.x, norms.y);
      const bool valid = coefficients_of < place.span.rows;
      coefs[coefficients_of].read_erase = valid ? make_float4(c.r_q, 0, c.e_k, 0) : make_float4(0, 0, 0, 0);
      coefs[coefficients_of].rest = valid ? make_float4(0, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
    }
  }
  sync_threads();
  {
    FactorWords<kKey> factors;
    factors.make(decays, thread);
    sync_threads();
    factors.store(*reinterpret_cast<FragmentFactors<kKey>*>(shared + Layout::kDecays), thread);
  }
  if (thread < kChunk) out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].rest.z : thread < place.span.rows ? 1.0f : 0.0f;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.bounded[j] = 1;
  if (fast) {
    for_each_fetched_row<kN, kPlain>(x, place, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
      float none[kN];
      channel_row<kKey, kOnline, true>(r, s, alpha[r], d, none, shared, notes.out);
    });
  } else {
    const Rows decays_again = chunk_rows(x.in.g, notes.place);
    float prefix[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) prefix[j] = 1;
    for_each_row<kN>(x, notes.place, coefs, [&](int r, const KeyStreams<kN>& s) {
      float row[kN];
      decay_row(x, decays_again, notes.place, r, row);
      channel_row<kKey, kOnline, false>(r, s, row, d, prefix, shared, notes.out);
    });
    bounded_keys<kKey, kOnline>(x, decays_again, notes.place, coefs, d.behind, shared, notes.out);
  }
  sync_threads();
  channel_pairs<kKey, kOnline>(shared, warp);

  const auto z_of = [&](int row) { return coefs[row].rest.z; };
  if constexpr (kOnline) {
    finish_channel<kKey>(shared, warp, notes.out, [&](int other, int others) {
      if (notes.out.z != nullptr) write_values(x, notes.place, z_of, notes.out.z, other, others);
      cp_async_wait<0>();
    });
  } else {
    start_offline<kKey>(shared + Layout::kP, notes.out);
    if (notes.out.z != nullptr) write_values(x, notes.place, z_of, notes.out.z, thread, kPrepareThreads);
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
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_channel<128, true>(args, chunks, stream) : launch_channel<128, false>(args, chunks, stream);
  } else {
    online ? launch_channel<64, true>(args, chunks, stream) : launch_channel<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
