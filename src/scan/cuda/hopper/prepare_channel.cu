// prepare where every key channel has a decay of its own. T_ij = sum over channels of e_i w_j exp(G_i - G_j), so decays belong to
// the operands, in blocks of 8 rows (one a warp). With L the product of a block's decays up to and including a row's own, R_b that of
// all of block b, and x_i = e_i L_i, times R of the even one for rows of the odd one of a pair of blocks:
//   within a block                              (e_i L_i) (w_j / L_j)
//   odd block with the even one before it       x_i (w_j / L_j)
//   pairs of blocks, columns of a block b       (x_i R_b R .. up to the start of i's pair) (w_j / L_j)
// The operands in memory are e L, r L and w / L; the other factors are multiplied to fragments of the left one.
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

// Products over each of the eight blocks, true and bounded; the true ones make room for products over several blocks (bounded).
template <int kKey>
struct BlockDecays {
  float total[8][kKey], bounded[8][kKey];
  // Rows of `total` later: over blocks 0 and 1, 4 and 5, 0 to 3, 1 to 3, 2 and 3.
  static constexpr int kFirstPair = 0, kThirdPair = 1, kFromZero = 2;
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

// Products over blocks of this lane's channels, and over all.
template <int kKey>
FW_DEVICE void block_products(const BlockDecays<kKey>& decays, int warp, bool own, ChannelDecays<kKey / 32>& d, float (&all)[kKey / 32]) {
  constexpr int kN = kKey / 32;
  const int channel = static_cast<int>(lane_index()) * kN;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.before[j] = d.behind[j] = all[j] = 1;
  FW_UNROLL
  for (int block = 0; block < 8; ++block) {
    float x[kN];
    load_floats(decays.total[block] + channel, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      all[j] *= x[j];
      if (block < warp) d.before[j] *= x[j];
      if (block > warp || (own && block == warp)) d.behind[j] *= x[j];
    }
  }
}
// The products over several blocks, of a channel; no warp reads the true ones any more.
template <int kKey>
FW_DEVICE void several_blocks(BlockDecays<kKey>& decays, int channel) {
  const auto b = [&](int block) { return decays.bounded[block][channel]; };
  const float pair = b(2) * b(3), from_one = b(1) * pair;
  decays.total[BlockDecays<kKey>::kFirstPair][channel] = b(0) * b(1);
  decays.total[BlockDecays<kKey>::kThirdPair][channel] = b(4) * b(5);
  decays.total[BlockDecays<kKey>::kFromZero][channel] = b(0) * from_one;
  decays.total[BlockDecays<kKey>::kFromZero + 1][channel] = from_one;
  decays.total[BlockDecays<kKey>::kFromZero + 2][channel] = pair;
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

// A fragment of the left operand as numbers, and the other way. Of lane's: element i is of row g (i = 0, 1, 4, 5) or g + 8, channels 2 t and the
// next (i < 4) or 8 more.
FW_DEVICE void unpack_fragment(const uint32_t (&a)[4], float (&x)[8]) {
  FW_UNROLL
  for (int i = 0; i < 4; ++i) x[2 * i] = bf16_low(a[i]), x[2 * i + 1] = bf16_high(a[i]);
}
FW_DEVICE void pack_fragment(const float (&x)[8], const float4& f, uint32_t (&a)[4]) {
  a[0] = pack_bf16(f.x * x[0], f.y * x[1]), a[1] = pack_bf16(f.x * x[2], f.y * x[3]);
  a[2] = pack_bf16(f.z * x[4], f.w * x[5]), a[3] = pack_bf16(f.z * x[6], f.w * x[7]);
}
// The factors of its channels, step k of 16, from a row of BlockDecays.
FW_DEVICE float4 fragment_factors(const float* row, int k) {
  const float* from = row + 16 * k + 2 * (static_cast<int>(lane_index()) & 3);
  const float2 low = *reinterpret_cast<const float2*>(from), high = *reinterpret_cast<const float2*>(from + 8);
  return make_float4(low.x, low.y, high.x, high.y);
}

// Tiles of 8 columns of the 16 rows of pair work.block of blocks. own: the columns of the pair; near: those of the pair before, of an odd
// pair; far: the first half of the chunk, of a pair of the second.
struct PairTiles {
  float own[2][4], near[2][4], far[4][4];
};
template <int kKey, bool kOnline>
FW_DEVICE void pair_tiles(const PairWork<kOnline>& work, uint32_t left, uint32_t right, const BlockDecays<kKey>& decays, PairTiles& c) {
  using Decays = BlockDecays<kKey>;
  const int block = work.block;
  const bool second = block >= 2, odd = (block & 1) != 0;
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    c.own[0][i] = c.own[1][i] = c.near[0][i] = c.near[1][i] = 0;
    FW_UNROLL
    for (int n = 0; n < 4; ++n) c.far[n][i] = 0;
  }
  FW_NO_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4], b[4];
    float x[8];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    unpack_fragment(a, x);
    const float4 even = fragment_factors(decays.bounded[2 * block], k);
    x[2] *= even.x, x[3] *= even.y, x[6] *= even.z, x[7] *= even.w;
    if (work.has(block)) {
      ldmatrix_x4(b, b_fragment(right, 16 * block, 2 * k));
      mma_bf16(c.own[1], a, b[2], b[3]);
      a[1] = pack_bf16(x[2], x[3]), a[3] = pack_bf16(x[6], x[7]);
      mma_bf16(c.own[0], a, b[0], b[1]);
    }
    if (odd) {
      const float4 f = fragment_factors(decays.total[second ? Decays::kThirdPair : Decays::kFirstPair], k);
      if (work.has(block - 1)) {
        ldmatrix_x4(b, b_fragment(right, 16 * block - 16, 2 * k));
        pack_fragment(x, f, a);
        mma_bf16(c.near[0], a, b[0], b[1]);
        pack_fragment(x, fragment_factors(decays.bounded[2 * block - 1], k), a);
        mma_bf16(c.near[1], a, b[2], b[3]);
      }
      if (second) {
        FW_UNROLL
        for (int i = 0; i < 8; i += 4) {
          const float f0 = i == 0 ? f.x : f.z, f1 = i == 0 ? f.y : f.w;
          x[i] *= f0, x[i + 1] *= f1, x[i + 2] *= f0, x[i + 3] *= f1;
        }
      }
    }
    if (second) {
      FW_UNROLL
      for (int n = 0; n < 4; n += 2) {
        if (!work.has(n / 2)) continue;
        ldmatrix_x4(b, b_fragment(right, 8 * n, 2 * k));
        pack_fragment(x, fragment_factors(decays.total[Decays::kFromZero + n], k), a);
        mma_bf16(c.far[n], a, b[0], b[1]);
        pack_fragment(x, fragment_factors(n == 0 ? decays.total[Decays::kFromZero + 1] : decays.bounded[3], k), a);
        mma_bf16(c.far[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// T and P.
template <int kKey, bool kOnline>
FW_DEVICE void channel_pairs(char* shared, int warp, const BlockDecays<kKey>& decays) {
  using Layout = ChannelLayout<kKey, kOnline>;
  const PairWork<kOnline> work(warp);
  const int block = work.block;
  const uint32_t base = shared_address(shared), left = base + (work.strict ? Layout::kErase : Layout::kReads);
  PairTiles c;
  pair_tiles<kKey, kOnline>(work, left, base + Layout::kUp, decays, c);
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
  {
    float all[kN];
    block_products(decays, warp, fast, d, all);
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
  }
  sync_threads();
  if (thread < kKey) several_blocks(decays, thread);
  if (thread < kChunk) out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].rest.z : thread < place.span.rows ? 1.0f : 0.0f;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) d.bounded[j] = 1;
  if (fast) {
    for_each_fetched_row<kN, kPlain>(x, place, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
      float none[kN];
      channel_row<kKey, kOnline, true>(r, s, alpha[r], d, none, shared, out);
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
  channel_pairs<kKey, kOnline>(shared, warp, decays);

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
