// prepare where every key channel has a decay of its own and a gain may exceed 1 (uses_hi_lo(), rule_traits.h). It is
// prepare/channel.cu with operands of two terms, so that T is as good as float32 numbers. It keeps what bf16
// leaves out of x, y, e and Khat. Streams are of numbers that bf16 has not, whatever the tensors are, for decays are in
// them. Of P, which nothing comes back from, the rows have one term.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       decays, streams and operands, in hi and lo parts, of a warp's 8 rows; a share of the blocks of T and P (hi_lo_pairs)
//   0 to 3    A = (I + T)^-1 in hi and lo parts;   4 to 7, and 0 and 2 before   meanwhile Z and what is read back (cp.async)
#include <algorithm>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/sm80/stores.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/channel_parts.cuh"

namespace fw::cuda {
namespace {

// Shared memory. w / L and what bf16 leaves out of it, e L and what .., r L, in place of the raw k, erase gate and
// q. Then w up to the middle of the chunk of tokens 0 to 31, and in rows 32 to 63 of the same matrix what bf16 leaves
// out of it. T, A and P overwrite w / L, M overwrites T, what bf16 leaves out of A and P overwrites w up to the
// middle. -E (becomes y) and then Khat (becomes x) overwrite e L, and Q overwrites r L.
//
// kScaled, in 99 KB: w up to the middle is made of w / L where it is an operand, and what bf16 leaves out of P
// overwrites the decays.
struct HiLoTraits {
  int k_tile = 128;  // 64 or 128
  bool scales_far = false;
};
template <HiLoTraits kTraits>
struct HiLoLayout {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kScaled = kTraits.scales_far;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kUp = 0, kUpLo = kOperand, kT = kUp, kA = kT + kTriangle, kP = kA + kSw128Bytes, kM = kT;
  static constexpr uint32_t kFar = std::max(2 * kOperand, kP + kSw128Bytes), kALow = kScaled ? kP + kSw128Bytes : kFar,
                            kLowEnd = kALow + kSw128Bytes;
  static constexpr uint32_t kErase = kScaled ? std::max(2 * kOperand, kLowEnd)
                                             : std::max(kFar + kOperand, kLowEnd + kSw128Bytes),
                            kEraseLo = kErase + kOperand, kReads = kEraseLo + kOperand;
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowScaleCoefs),
                            kPLow = kScaled ? kDecays : kLowEnd;
  static constexpr uint32_t kDecayBytes = sizeof(BlockDecays<kTileK>),
                            kOnes = kDecays + (kScaled ? std::max(kDecayBytes, uint32_t{kSw128Bytes}) : kDecayBytes);
  static constexpr uint32_t kBytes = kOnes + kChunk * sizeof(float);
  static constexpr int kBlocks = kScaled ? 1 : 2;
  static_assert(kFar % 1024 == 0 && kErase % 1024 == 0 && kPLow % 1024 == 0 &&
                kBlocks * (kBytes + 1024) <= 228 * 1024 && (!kScaled || kBytes <= kSm80SharedBytes));
};
inline constexpr uint32_t kLoRows = 32 * 128;  // from rows 0 to 31 of a matrix to rows 32 to 63: bytes

template <int kN>
FW_DEVICE void store_terms(void* to, void* lo_parts, const float (&x)[kN]) {
  const PackedChannels<kN> packed = pack_channels(x);
  store_packed(to, packed);
  store_packed(lo_parts, pack_lo_parts(x, packed));
}

// Khat of a row, where chunk tiles will be.
template <int kTileK>
FW_DEVICE void store_key(int r, const float (&k)[kTileK / 32], const ChunkTiles<kTileK>& out) {
  const uint32_t at = lane_offset<kTileK / 32>(r);
  store_terms(reinterpret_cast<char*>(out.forward->x) + at, reinterpret_cast<char*>(out.forward_lo->lo) + at, k);
  if (out.backward != nullptr) store_terms(reinterpret_cast<char*>(out.backward->k) + at, out.k_lo + at, k);
}

// The streams of a row of the warp: the operands of T and P to shared memory, and with their decays to the chunk tiles.
template <class Layout, RowDecays kDecays, int kTileK = Layout::kTileK>
FW_DEVICE void fine_row(int r, int warp, const KeyStreams<kTileK / 32>& s, const float (&alpha)[kTileK / 32],
                        ChannelDecays<kTileK / 32>& d, char* shared, const ChunkTiles<kTileK>& out) {
  constexpr int kN = kTileK / 32;
  const uint32_t at = lane_offset<kN>(r);
  const DecayedRow<kN> row = decayed_row<kDecays>(s, alpha, d);
  store_packed(shared + Layout::kReads + at, pack_channels(row.reads));
  store_terms(shared + Layout::kUp + at, shared + Layout::kUpLo + at, row.up);
  store_terms(shared + Layout::kErase + at, shared + Layout::kEraseLo + at, row.erase);
  if (!Layout::kScaled && warp < 4) {
    float far[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) far[j] = d.far[j] * row.down[j];
    store_terms(shared + Layout::kFar + at, shared + Layout::kFar + kLoRows + at, far);
  }
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, pack_channels(row.q));
  store_terms(reinterpret_cast<char*>(out.forward->e) + at, out.e_lo + at, row.e);
  if constexpr (kDecays == RowDecays::kExact) store_key<kTileK>(r, row.k, out);
  sync_warp();  // rows stay apart: with addresses of later ones made ahead there are too few registers
}

// A fragment of hi and lo parts. Registers m and m + 2 have channels that are 8 apart (in a right operand's: m and m +
// 1).
struct Terms {
  uint32_t high[4], lo_parts[4];
};
FW_DEVICE void scale_term(Terms& x, int m, const float2& factor) {
  const float a = (bf16_low(x.high[m]) + bf16_low(x.lo_parts[m])) * factor.x,
              b = (bf16_high(x.high[m]) + bf16_high(x.lo_parts[m])) * factor.y;
  x.high[m] = pack_bf16(a, b), x.lo_parts[m] = pack_lo(x.high[m], a, b);
}
// The right operand is registers m and m + 1 of b.
FW_DEVICE void mma_terms(float (&c)[4], const Terms& a, const Terms& b, int m) {
  mma_bf16(c, a.lo_parts, b.high[m], b.high[m + 1]);
  mma_bf16(c, a.high, b.lo_parts[m], b.lo_parts[m + 1]);
  mma_bf16(c, a.high, b.high[m], b.high[m + 1]);
}

// left: one matrix, or two where lo parts is not 0.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void hi_lo_pair_tiles(uint32_t left, uint32_t left_lo, uint32_t base, const BlockDecays<kTileK>& decays,
                                int block, PairTiles& c) {
  clear_pair_tiles(c);
  // Channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a step.
  const auto factors = [&](int of_block, int k) {
    return decays.bounded[of_block] + 2 * (static_cast<int>(lane_index()) & 3) + 16 * k;
  };
  const auto pair = [](const float* x) { return *reinterpret_cast<const float2*>(x); };
  const auto product = [&](const float* x, const float* y) { return make_float2(x[0] * y[0], x[1] * y[1]); };
  FW_NO_UNROLL
  for (int k = 0; k < kTileK / 16; ++k) {
    Terms a, b;
    ldmatrix_x4(a.high, a_fragment(left, 16 * block, 2 * k));
    if (left_lo != 0) {
      ldmatrix_x4(a.lo_parts, a_fragment(left_lo, 16 * block, 2 * k));
    } else {
      FW_UNROLL
      for (int i = 0; i < 4; ++i) a.lo_parts[i] = 0;
    }
    const Terms own = a;
    const float* even = factors(2 * block, k);
    scale_term(a, 1, pair(even)), scale_term(a, 3, pair(even + 8));
    ldmatrix_x4(b.high, b_fragment(base + Layout::kUp, 16 * block, 2 * k));
    ldmatrix_x4(b.lo_parts, b_fragment(base + Layout::kUpLo, 16 * block, 2 * k));
    mma_terms(c.own[0], a, b, 0);
    mma_terms(c.own[1], own, b, 2);  // what lies above the diagonal is cut
    if ((block & 1) != 0) {
      ldmatrix_x4(b.high, b_fragment(base + Layout::kUp, 16 * (block - 1), 2 * k));
      ldmatrix_x4(b.lo_parts, b_fragment(base + Layout::kUpLo, 16 * (block - 1), 2 * k));
      const float *first = factors(2 * block - 2, k), *second = factors(2 * block - 1, k);
      scale_term(b, 0, product(first, second)), scale_term(b, 1, product(first + 8, second + 8));
      scale_term(b, 2, pair(second)), scale_term(b, 3, pair(second + 8));
      mma_terms(c.near[0], a, b, 0);
      mma_terms(c.near[1], a, b, 2);
    }
    if (block < 2) continue;
    if (block == 3) {
      const float *first = factors(4, k), *second = factors(5, k);
      const float2 low = product(first, second), high = product(first + 8, second + 8);
      scale_term(a, 0, low), scale_term(a, 1, low), scale_term(a, 2, high), scale_term(a, 3, high);
    }
    [[maybe_unused]] float2 low = make_float2(1, 1), high = low;  // kScaled: from the end of block n + 1 to the middle
    FW_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const int n = Layout::kScaled ? 2 - i : i;
      if constexpr (Layout::kScaled) {
        const auto with = [](float2& x, const float2& y) { x.x *= y.x, x.y *= y.y; };
        ldmatrix_x4(b.high, b_fragment(base + Layout::kUp, 8 * n, 2 * k));
        ldmatrix_x4(b.lo_parts, b_fragment(base + Layout::kUpLo, 8 * n, 2 * k));
        const float *second = factors(n + 1, k), *first = factors(n, k);
        with(low, pair(second)), with(high, pair(second + 8));
        scale_term(b, 2, low), scale_term(b, 3, high);
        with(low, pair(first)), with(high, pair(first + 8));
        scale_term(b, 0, low), scale_term(b, 1, high);
      } else {
        ldmatrix_x4(b.high, b_fragment(base + Layout::kFar, 8 * n, 2 * k));
        ldmatrix_x4(b.lo_parts, b_fragment(base + Layout::kFar, 32 + 8 * n, 2 * k));
      }
      mma_terms(c.far[n], a, b, 0);
      mma_terms(c.far[n + 1], a, b, 2);
    }
  }
}

// T and P: warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void hi_lo_pairs(char* shared, int warp, const BlockDecays<kTileK>& decays) {
  const int block = warp < 4 ? warp : 7 - warp;  // the two warps of one scheduler share its work evenly
  const bool strict = warp < 4;
  const uint32_t base = shared_address(shared);
  PairTiles c;
  hi_lo_pair_tiles<Layout>(base + (strict ? Layout::kErase : Layout::kReads), strict ? base + Layout::kEraseLo : 0,
                           base, decays, block, c);
  sync_threads();  // T and P overwrite operands
  clear_above(shared + Layout::kP);
  if (strict) {
    const TriangleRows triangle = triangle_rows(shared + Layout::kT, block);
    store_pair_tiles<true>(block, true, true, c, [&](int n, const float(&tile)[4]) { store_tile(triangle, n, tile); });
  } else {
    const uint32_t sw128 = sw128_rows(block);
    store_pair_tiles<false>(block, true, true, c, [&](int n, const float(&tile)[4]) {
      store_tile(shared + Layout::kP, sw128, n, tile);
      store_lo(shared + Layout::kPLow, sw128, n, tile);
    });
  }
}

template <class Layout>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(Layout::kBlocks))
    prepare_channel_hi_lo_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag) {
  constexpr int kTileK = Layout::kTileK, kN = kTileK / 32;
  const Problem& x = args.problem;
  const bool fetched = fetched_flag != 0;
  char* shared = shared_memory();
  RowScaleCoefs* coefs = reinterpret_cast<RowScaleCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kTileK>& decays = *reinterpret_cast<BlockDecays<kTileK>*>(shared + Layout::kDecays);
  float* const ones = reinterpret_cast<float*>(shared + Layout::kOnes);
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  const ChunkTiles<kTileK> out = chunk_tiles_of<kTileK>(args, coord.item);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp();
  const bool training = out.backward != nullptr;

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kUp, shared + Layout::kErase};
  const Rows decay_tensor = chunk_rows(x.in.g, coord);
  if (fetched) fetch_front<kN>(x, coord, raw);
  float alpha[kWarpRows][kN];
  ChannelDecays<kN> d;
  const bool exact = block_decays(x, decay_tensor, coord, fetched, warp, alpha, d, decays);
  make_coefs<kN>(x, coord, fetched, raw, coefs);
  sync_threads();
  finish_block_decays(decays, warp, d, out);
  if (thread < kChunk) {
    ones[thread] = 1;
    out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].lo.z : thread < coord.span.rows ? 1.0f : 0.0f;
    out.forward_lo->scale[thread] = 1;
    if (training) out.backward_lo->scale[thread] = 1;
  }
  if (fetched && exact) {
    for_each_fetched_row<kN, false>(x, coord, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
      fine_row<Layout, RowDecays::kExact>(r, warp, s, alpha[r], d, shared, out);
    });
  } else {
    for_each_row<kN>(x, coord, coefs, [&](int r, const KeyStreams<kN>& s) {
      float row[kN];
      decay_row(x, decay_tensor, coord, r, row);
      fine_row<Layout, RowDecays::kBounded>(r, warp, s, row, d, shared, out);
    });
    bounded_keys<kN>(x, decay_tensor, coord, coefs, d.behind,
                     [&](int r, const float(&k)[kN]) { store_key<kTileK>(r, k, out); });
  }
  fence_async_global();  // Khat, which x overwrites by copies of TMA
  sync_threads();
  hi_lo_pairs<Layout>(shared, warp, decays);

  char *const erase = shared + Layout::kErase, *const erase_lo = shared + Layout::kEraseLo,
              *const reads = shared + Layout::kReads;
  const auto issue_keys = [&](int i, int threads) {
    bring<kTileK>(out.forward->x, erase, i, threads);
    bring<kTileK>(out.forward_lo->lo, erase_lo, i, threads);
  };
  if (warp < 4) {
    invert<true>(reinterpret_cast<float*>(shared + Layout::kT), shared + Layout::kA,
                 {shared + Layout::kALow, ones, ones}, warp, [] {});
  } else {
    overlap_invert<true>();
  }
  if (warp >= 4 || warp % 2 == 0) {
    const int i = (warp >= 4 ? warp - 4 : 4 + warp / 2) * 32 + static_cast<int>(lane_index()),
              threads = kMeanwhileWarps * 32;
    if (training) {
      bring<kTileK>(out.forward->e, erase, i, threads);
      bring<kTileK>(out.e_lo, erase_lo, i, threads);
      bring<kTileK>(out.forward->q, reads, i, threads);
    } else {
      issue_keys(i, threads);
    }
    cp_async_commit();
    if (out.z != nullptr)
      write_values(
          x, coord, [&](int row) { return coefs[row].lo.z; }, out.z, i, threads);
    cp_async_wait<0>();
  }
  sync_threads();

  const SplitSw128 a{shared_address(shared + Layout::kA), shared_address(shared + Layout::kALow)},
      p{shared_address(shared + Layout::kP), shared_address(shared + Layout::kPLow)};
  read_products<true>(p, a, shared + Layout::kM, warp);
  if (training) {
    if (warp < kTileK / 16) {
      ReadBuffers buffers{shared_address(erase), shared_address(reads), shared_address(erase), nullptr, nullptr};
      buffers.e_lo = buffers.y_lo = shared_address(erase_lo);
      transform_reads<RowForm::kStreams, true>(buffers, a, p.high, warp);
    }
    store_block([&](auto&& copy) {
      copy(out.backward->y, erase, sizeof out.backward->y);
      copy(out.backward_lo->lo, erase_lo, sizeof out.backward_lo->lo);
      copy(out.backward->q, reads, sizeof out.backward->q);
    });
    sync_threads();
    issue_keys(thread, kPrepareThreads);
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
  }
  if (warp < kTileK / 16) {
    uint32_t lo_parts[4][4];
    transform_keys<false, true>(
        shared_address(erase), nullptr, a, warp, [](float(&)[8][4]) {}, shared_address(erase_lo), lo_parts);
    store_slice(shared_address(erase_lo), warp, lo_parts);
  }
  store_block([&](auto&& copy) {
    copy(out.forward->x, erase, sizeof out.forward->x);
    copy(out.forward_lo->lo, erase_lo, sizeof out.forward_lo->lo);
    copy(out.forward->m, shared + Layout::kM, kSw128Bytes);
    if (out.pairs != nullptr) {
      copy(out.pairs->a, shared + Layout::kA, kSw128Bytes);
      copy(out.pairs->p, shared + Layout::kP, kSw128Bytes);
    }
  });
}

}  // namespace

void prepare_channel_hi_lo(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks,
                           void* stream) {
  const PrepareKernel kernel = choice.kernel;
  const bool copied = kernel == PrepareKernel::kChannelHiLo || kernel == PrepareKernel::kSm80ChannelHiLo,
             in_99_kb = kernel == PrepareKernel::kSm80ChannelHiLo || kernel == PrepareKernel::kSm80ChannelHiLoRead;
  with_constants(
      [&](auto small, auto scales_far) {
        using Layout = HiLoLayout<HiLoTraits{.k_tile = small ? 64 : 128, .scales_far = scales_far}>;
        launch(prepare_channel_hi_lo_kernel<Layout>, prepare_grid(args.problem, chunks), kPrepareThreads,
               Layout::kBytes, stream, args, static_cast<int>(copied));
      },
      k_tile == 64, in_99_kb);
}

}  // namespace fw::cuda
