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

// Bounded products over several blocks as bf16 factors of fragments of the left operand, for a lane of quad t in step k of 16 channels. x, y: rows
// of the even block of a pair, channels 2 t and the next, and 8 more; z, w: rows of the odd one, with R of the even one.
template <int kKey>
struct FragmentFactors {
  uint4 tile[12][kKey / 16][4];  // tiles of 8 columns before a pair's own: 2 of pair 1, 4 of pair 2, 6 of pair 3
  uint2 odd[4][kKey / 16][4];    // of each pair's odd rows for its even columns: R of the even block
  static FW_DEVICE int first(int pair) { return pair * (pair - 1); }
};
// Products over each of the eight blocks, true (until the factors take their place) and bounded.
template <int kKey>
struct BlockDecays {
  union {
    float total[8][kKey];
    FragmentFactors<kKey> factors;
  };
  float bounded[8][kKey];
};

// What a block knows of itself, from memory once the rows are through: there are no registers for it before.
template <int kKey>
struct BlockNotes {
  ChunkPlace place;
  ChunkImages<kKey> out;
};

// Shared memory. Online: keys (Khat; becomes x), w / L, e L, r L. T takes the place of w / L, P and A that of e L. Where the backward image
// is wanted, Q takes the place of r L, and -E that of T once A is there. Offline: w / L, r L; P takes the place of w / L. Raw keys and reads of
// the next chunk come while this one's are at work.
template <int kKey, bool kOnline>
struct ChannelLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeys = 0, kUp = kOnline ? kOperand : 0, kT = kUp, kErase = kUp + (kOnline ? std::max(kOperand, kTriangle) : kOperand);
  static constexpr uint32_t kA = kErase + kPanelBytes, kP = kOnline ? kErase : kUp, kMinusE = kT;
  static constexpr uint32_t kReads = kErase + (kOnline ? std::max<uint32_t>(kOperand, 2 * kPanelBytes) : 0);
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static constexpr uint32_t kNotes = kDecays + sizeof(BlockDecays<kKey>);
  static constexpr uint32_t kRawKeys = (kNotes + 128 + 1023) / 1024 * 1024, kRawReads = kRawKeys + kOperand, kBytes = kRawReads + kOperand;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024);
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
// Log-decays of this lane's channels of the warp's rows as they lie in memory, so that nothing waits for them: 0 past the chunk's rows.
template <int kN>
struct RawDecays {
  uint32_t bits[kWarpRows][kN];

  FW_DEVICE void load(const TokenArg& tensor, const ChunkPlace& place) {
    const Rows rows = chunk_rows(tensor, place);
    const int channel = static_cast<int>(lane_index()) * kN, first = static_cast<int>(warp_index()) * kWarpRows;
    const bool low = rows.bf16 != 0;
    const char* from = rows.data + ((first * rows.stride + channel) << (low ? 1 : 2));
    const int64_t step = rows.stride << (low ? 1 : 2);
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r, from += step) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) bits[r][j] = 0;
      if (first + r >= place.span.rows) continue;
      if (low) {
        const PackedChannels<kN> packed = load_packed<kN>(from);
        FW_UNROLL
        for (int j = 0; j < kN / 2; ++j) bits[r][j] = packed.words[j];
      } else {
        float x[kN];
        load_floats(reinterpret_cast<const float*>(from), x);
        FW_UNROLL
        for (int j = 0; j < kN; ++j) bits[r][j] = float_bits(x[j]);
      }
    }
  }
  FW_DEVICE void decode(bool low, float (&alpha)[kWarpRows][kN]) const {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) {
        const uint32_t word = low ? bits[r][j / 2] : bits[r][j];
        alpha[r][j] = bits_float(!low ? word : j % 2 == 0 ? word << 16 : word & 0xffff0000u);
      }
      exponentials(alpha[r]);
    }
  }
};

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

// The factors of two channels for one pair of blocks: a thread has channels 2 p and the next, p = thread % (kKey / 2), and pair thread / (kKey / 2), if
// there is one.
template <int kKey>
FW_DEVICE void make_factors(BlockDecays<kKey>& decays, int thread) {
  constexpr int kPairs = kKey / 2;
  const int pair = thread / kPairs, p = thread % kPairs, k = p >> 3, high = (p >> 2) & 1, t = p & 3;
  if (pair >= 4) return;
  const float* from = decays.bounded[2 * pair] + 2 * p;
  const float2 r = *reinterpret_cast<const float2*>(from);
  float2 x = make_float2(1, 1);
  reinterpret_cast<uint32_t*>(&decays.factors.odd[pair][k][t])[high] = pack_bf16(r.x, r.y);
  uint4* tile = &decays.factors.tile[FragmentFactors<kKey>::first(pair) + 2 * pair - 1][k][t];
  FW_NO_UNROLL
  for (int block = 2 * pair - 1; block >= 0; --block) {
    from -= kKey;
    const float2 y = *reinterpret_cast<const float2*>(from);
    x.x *= y.x, x.y *= y.y;
    uint32_t* to = reinterpret_cast<uint32_t*>(tile) + high;
    to[0] = pack_bf16(x.x, x.y), to[2] = pack_bf16(r.x * x.x, r.y * x.y);
    tile -= kKey / 16 * 4;
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
  pair_tiles<kKey, kOnline>(work, left, base + Layout::kUp, reinterpret_cast<const BlockDecays<kKey>*>(shared + Layout::kDecays)->factors, c);
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
  }
}

// A block's share of the chunks and value heads, every grid-th; kPlain: plain_streams(), and fetched_flag is set.
template <int kKey, bool kOnline, bool kPlain>
__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag, unsigned items) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  const bool fetched = kPlain || fetched_flag != 0;
  char* shared = shared_memory();
  RowCoefs* coefs = reinterpret_cast<RowCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kKey>& decays = *reinterpret_cast<BlockDecays<kKey>*>(shared + Layout::kDecays);
  BlockNotes<kKey>& notes = *reinterpret_cast<BlockNotes<kKey>*>(shared + Layout::kNotes);
  static_assert(sizeof notes <= 128);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp(), lane = static_cast<int>(lane_index()), channel = lane * kN;
  const int coefficients_of = kPlain ? coefficient_row(warp) : -1;
  const RawMatrices raw{shared + Layout::kRawReads, shared + Layout::kRawKeys, shared + Layout::kErase};

  const auto place_at = [&](unsigned item) {
    const unsigned heads = static_cast<unsigned>(x.HV);
    return place_of(x, item / heads, item % heads);
  };
  RawDecays<kN> ahead;
  const auto fetch = [&](unsigned item) {
    if (!fetched) return;
    const ChunkPlace place = place_at(item);
    fetch_rows<kN>(x.in.k, place, raw.k);
    fetch_rows<kN>(x.in.q, place, raw.q);
    cp_async_commit();
    if (channel_erase(x.rule)) {  // its place is in use
      const int row = warp * kWarpRows + lane;
      if (lane < kWarpRows && row < place.span.rows) bulk_prefetch(row_address(x.in.erase_gate, place, row), 2 * kKey);
    }
  };
  const auto fetch_decays = [&](unsigned item) {
    if (fetched) ahead.load(x.in.g, place_at(item));
  };
  if (kPlain) fetch(block_index_x()), fetch_decays(block_index_x());
  unsigned item = block_index_x();
  FW_NO_UNROLL
  do {
    const ChunkPlace place = place_at(item);
    const Rows decay_tensor = chunk_rows(x.in.g, place);
    const PlainGates gates = plain_gates(x, place, coefficients_of);
    if (!kPlain) fetch(item), fetch_decays(item);
    if (thread == 0) {
      notes = {place, chunk_images<kKey>(args, place.item)};
      bulk_wait_read<0>();  // by the stores of the chunk before
    }

    float alpha[kWarpRows][kN];
    ChannelDecays<kN> d;
    bool exact = true;
    {
      float total[kN];
      FW_UNROLL
      for (int j = 0; j < kN; ++j) total[j] = 1;
      if (fetched) {
        ahead.decode(x.in.g.bf16 != 0, alpha);
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
    if (fetched && channel_erase(x.rule)) {
      fetch_rows<kN>(x.in.erase_gate, notes.place, raw.b);
      cp_async_commit();
    }
    block_products(decays, warp, fast, d);
    if (warp == 1) {
      float gamma[kN], x[kN];
      load_floats(decays.total[1] + channel, x);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) gamma[j] = d.before[j] * d.behind[j] * (fast ? 1.0f : x[j]);
      store_floats(notes.out.forward->gamma + channel, gamma);
      if (notes.out.backward != nullptr) store_floats(notes.out.backward->gamma + channel, gamma);
    }
    if constexpr (kPlain) {
      if (coefficients_of >= 0) {
        const float4 norms = coefs[coefficients_of].read_erase;
        const FrontCoefs<float> c = plain_coefs(x, gates, norms.x, norms.y);
        const bool valid = coefficients_of < notes.place.span.rows;
        coefs[coefficients_of].read_erase = valid ? make_float4(c.r_q, 0, c.e_k, 0) : make_float4(0, 0, 0, 0);
        coefs[coefficients_of].rest = valid ? make_float4(0, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
      }
    }
    sync_threads();
    make_factors(decays, thread);
    if (thread < kChunk) notes.out.forward->z_scale[thread] = notes.out.z == nullptr ? coefs[thread].rest.z : thread < notes.place.span.rows ? 1.0f : 0.0f;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d.bounded[j] = 1;
    if (fetched) front_arrived();
    if (fast) {
      for_each_fetched_row<kN, kPlain>(x, notes.place, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
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
    if (kPlain && item + grid_size_x() < items) fetch(item + grid_size_x());
    channel_pairs<kKey, kOnline>(shared, warp);
    if (kPlain && item + grid_size_x() < items) fetch_decays(item + grid_size_x());

    const auto z_of = [&](int row) { return coefs[row].rest.z; };
    if constexpr (kOnline) {
      finish_channel<kKey>(shared, warp, notes.out, [&](int other, int others) {
        if (notes.out.z != nullptr) write_values(x, notes.place, z_of, notes.out.z, other, others);
        if (notes.out.backward != nullptr) cp_async_wait<0>();
      });
    } else {
      start_offline<kKey>(shared + Layout::kP, notes.out);
      if (notes.out.z != nullptr) write_values(x, notes.place, z_of, notes.out.z, thread, kPrepareThreads);
      sync_threads();
    }
    item += grid_size_x();
  } while (kPlain && item < items);
  finish_offline();
}

#ifdef FW_CUDA_EMULATION
inline constexpr int64_t kProcessors = 1;  // so that small problems have several chunks a block
#else
inline constexpr int64_t kProcessors = 132;
#endif

template <int kKey, bool kOnline>
void launch_channel(const PrepareArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const bool fetched = can_fetch(x, kKey);
  const bool plain = fetched && plain_streams(x);
  const int64_t items = chunks * x.HV, blocks = plain ? 2 * kProcessors : items;
  const Dim3 grid{static_cast<unsigned>(items < blocks ? items : blocks)};
  launch(plain ? prepare_channel_kernel<kKey, kOnline, true> : prepare_channel_kernel<kKey, kOnline, false>, grid, kPrepareThreads,
         ChannelLayout<kKey, kOnline>::kBytes, stream, args, static_cast<int>(fetched), static_cast<unsigned>(items));
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
