// A = (I + T)^-1 for a strictly lower triangular T of 64 rows, float32 in shared memory. The diagonal blocks of 16 are
// made by forward substitution. Blocks of 32 and 64 are made by products of TF32 operands, [A11 0; -A22 T21 A11, A22].
// Never a Neumann series: its partial sums blow up for keys that are alike.
//
// Of keys that hardly differ, roundings of A to bf16 add up along a column. There (keys_are_alike()) a row of A is
// rounded before the rows below are made of it, so that these correct it: (I + T) A is I but for one rounding of each
// entry of A.
#pragma once

#include <bit>

#include "gpu/sm80/stores.cuh"
#include "gpu/sw128_atoms.cuh"

namespace fw::cuda {

// Element of entry (i, j), j not above the diagonal block of i: rows of 16, 32, 48 and 64 columns, each 8 longer
// against bank conflicts.
FW_DEVICE int triangle_stride(int block) { return 24 + 16 * block; }
FW_DEVICE int triangle_index(int i, int j) {
  const int block = i >> 4;
  return 128 * block * (block + 2) + (i & 15) * triangle_stride(block) + j;
}
inline constexpr uint32_t kTriangleBytes = 4 * 3072;

inline constexpr int kInverseBarrier = 1;  // and the next three

// To nearest, of the bits that a product reads; infinite numbers become no numbers.
FW_DEVICE uint32_t nearest_tf32(float x) { return float_bits(x) + 0x1000u; }
// What that leaves out.
FW_DEVICE uint32_t lo_tf32(float x) { return nearest_tf32(x - bits_float(nearest_tf32(x) & 0xffffe000u)); }

// A product of TF32 operands; kHiLo: and of each with what rounding leaves out of the other.
template <bool kHiLo>
FW_DEVICE void mma_tf32_of(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const uint32_t high[4] = {nearest_tf32(a[0]), nearest_tf32(a[1]), nearest_tf32(a[2]), nearest_tf32(a[3])};
  mma_tf32(c, high, nearest_tf32(b0), nearest_tf32(b1));
  if constexpr (kHiLo) {
    const uint32_t low[4] = {lo_tf32(a[0]), lo_tf32(a[1]), lo_tf32(a[2]), lo_tf32(a[3])};
    mma_tf32(c, low, nearest_tf32(b0), nearest_tf32(b1));
    mma_tf32(c, high, lo_tf32(b0), lo_tf32(b1));
  }
}

// kHiLo: what is stored is diag(rows) A diag(columns) (unscaled_keys.cuh), and what bf16 leaves out of it in the SW128
// tile `low`.
struct HiLoInverse {
  char* low = nullptr;
  const float *rows = nullptr, *columns = nullptr;
};

// (I + T)^-1 x for the diagonal block of T at `corner`, by forward substitution; rounds: each number of the result to
// bf16, before it is used.
template <bool rounds>
FW_DEVICE void substitute(const float* corner, int stride, float (&x)[16]) {
  const auto round = [](float& y) { y = bf16_value(bf16_bits(y)); };
  FW_UNROLL
  for (int j = 0; j < 16; j += 4) {
    if constexpr (rounds) round(x[j]);
    FW_UNROLL
    for (int i = j + 1; i < 16; ++i) {
      const float4 y = *reinterpret_cast<const float4*>(corner + i * stride + j);
      const float row[4] = {y.x, y.y, y.z, y.w};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        if (j + m < i) x[i] -= row[m] * x[j + m];
      }
      if constexpr (rounds) {
        if (i < j + 4) round(x[i]);
      }
    }
  }
}

// A diagonal block by one warp, in place: one column a lane, in both half-warps.
FW_DEVICE void invert_diagonal(float* t, int block) {
  const int lane = static_cast<int>(lane_index()), column = lane & 15, stride = triangle_stride(block);
  float* corner = t + triangle_index(16 * block, 16 * block);
  float x[16];
  FW_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
  substitute<false>(corner, stride, x);
  sync_warp();
  FW_UNROLL
  for (int i = 0; i < 16; i += 2) corner[(i + (lane >> 4)) * stride + column] = lane < 16 ? x[i] : x[i + 1];
  sync_warp();
}
// To the SW128 tile a, with zeros in the blocks alongside it.
template <bool kHiLo>
FW_DEVICE void store_diagonal(const float* t, char* a, const HiLoInverse& hi_lo, int block) {
  const int lane = static_cast<int>(lane_index()), row = lane >> 1, atom = lane & 1;
  const float* from = t + triangle_index(16 * block + row, 16 * block + atom * 8);
  float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
  if constexpr (kHiLo) {
    const float f = hi_lo.rows[16 * block + row], *columns = hi_lo.columns + 16 * block + atom * 8;
    low.x *= f * columns[0], low.y *= f * columns[1], low.z *= f * columns[2], low.w *= f * columns[3];
    high.x *= f * columns[4], high.y *= f * columns[5], high.z *= f * columns[6], high.w *= f * columns[7];
  }
  const uint4 packed = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                                  pack_bf16(high.z, high.w));
  *reinterpret_cast<uint4*>(a + atom_offset(16 * block + row, 2 * block + atom)) = packed;
  if constexpr (kHiLo) {
    *reinterpret_cast<uint4*>(hi_lo.low + atom_offset(16 * block + row, 2 * block + atom)) =
        make_uint4(pack_lo(packed.x, low.x, low.y), pack_lo(packed.y, low.z, low.w), pack_lo(packed.z, high.x, high.y),
                   pack_lo(packed.w, high.z, high.w));
  }
  FW_UNROLL
  for (int right = 1; right < 4; ++right) {
    if (right > block)
      *reinterpret_cast<uint4*>(a + atom_offset(16 * block + row, 2 * right + atom)) = make_uint4(0, 0, 0, 0);
  }
}

// The accumulator of a product with the result's columns as the next product's summed index. Columns 2t and 2t + 1 of a
// lane stand where t and t + 4 are expected, so the other operand takes them in that order.
FW_DEVICE void as_left(const float (&c)[4], float (&a)[4]) { a[0] = c[0], a[1] = c[2], a[2] = c[1], a[3] = c[3]; }

// Columns `column` .. + 15 of A22 T21 A11 for blocks of kSize rows that begin at `first`, as its transpose in out (tile
// n: rows 8 n .. 8 n + 7 of the block below). What lies above the diagonal of A11 and A22 in blocks of 16 is not read.
template <int kSize, bool kHiLo>
FW_DEVICE void below_diagonal(const float* t, int first, int column, float (&out)[kSize / 8][4]) {
  const int lane = static_cast<int>(lane_index()), g = lane >> 2, k = lane & 3, low = first + kSize;
  float u[kSize / 8][4];  // (T21 A11)^T: 16 columns, kSize rows
  FW_UNROLL
  for (int n = 0; n < kSize / 8; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) u[n][i] = out[n][i] = 0;
  }
  FW_UNROLL
  for (int step = 0; step < kSize / 8; ++step) {
    const int m = 8 * step;
    if (m < column) continue;
    float a[4];
    a[0] = t[triangle_index(first + m + k, first + column + g)];
    a[1] = t[triangle_index(first + m + k, first + column + g + 8)];
    a[2] = t[triangle_index(first + m + k + 4, first + column + g)];
    a[3] = t[triangle_index(first + m + k + 4, first + column + g + 8)];
    FW_UNROLL
    for (int n = 0; n < kSize / 8; ++n) {
      const int row = low + 8 * n + g;
      mma_tf32_of<kHiLo>(u[n], a, t[triangle_index(row, first + m + k)], t[triangle_index(row, first + m + k + 4)]);
    }
  }
  FW_UNROLL
  for (int r = 0; r < kSize / 8; ++r) {
    float a[4];
    as_left(u[r], a);
    FW_UNROLL
    for (int n = r / 2 * 2; n < kSize / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(t + triangle_index(low + 8 * n + g, low + 8 * r + 2 * k));
      mma_tf32_of<kHiLo>(out[n], a, x.x, x.y);
    }
  }
}

// Minus that into the SW128 tile.
template <int kSize, bool kHiLo>
FW_DEVICE void store_below_diagonal(uint32_t sw128, const HiLoInverse& hi_lo, int first, int column,
                                    float (&out)[kSize / 8][4]) {
  const uint32_t sw128_low = kHiLo ? shared_address(hi_lo.low) : 0;
  if constexpr (kHiLo) {
    const int lane = static_cast<int>(lane_index()), at = first + column + (lane >> 2);
    const float of_column[2] = {hi_lo.columns[at], hi_lo.columns[at + 8]};
    FW_UNROLL
    for (int n = 0; n < kSize / 8; ++n) {
      const float2 of_row = *reinterpret_cast<const float2*>(hi_lo.rows + first + kSize + 8 * n + 2 * (lane & 3));
      FW_UNROLL
      for (int i = 0; i < 4; ++i) out[n][i] *= of_column[i / 2] * (i % 2 == 0 ? of_row.x : of_row.y);
    }
  }
  FW_UNROLL
  for (int j = 0; j < kSize / 16; ++j) {
    const float(&x)[4] = out[2 * j], (&y)[4] = out[2 * j + 1];
    const uint32_t packed[4] = {pack_bf16(-x[0], -x[1]), pack_bf16(-x[2], -x[3]), pack_bf16(-y[0], -y[1]),
                                pack_bf16(-y[2], -y[3])};
    store_matrices<true>(a_fragment_trans(sw128, first + kSize + 16 * j, (first + column) / 8), packed);
    if constexpr (kHiLo) {
      const uint32_t lo[4] = {pack_lo(packed[0], -x[0], -x[1]), pack_lo(packed[1], -x[2], -x[3]),
                              pack_lo(packed[2], -y[0], -y[1]), pack_lo(packed[3], -y[2], -y[3])};
      store_matrices<true>(a_fragment_trans(sw128_low, first + kSize + 16 * j, (first + column) / 8), lo);
    }
  }
}

// ---- Keys that hardly differ

// Whether tokens 8 to 15 erase much of what the first eight wrote: keys are equal or few in turn, at steps above a
// quarter. By warp 0 before a barrier, then by all. Only the first 16 tokens decide, and only for those behind them,
// so that no bits of a token depend on later ones. The answer lies where a row of T is longer than its columns.
inline constexpr float kAlikeEntry = 0.25f;
inline constexpr int kAlikeLanes = 16;  // of those with such an entry among two: of keys at random one in ten has
FW_DEVICE uint32_t& alike_lanes(float* t) { return *reinterpret_cast<uint32_t*>(t + triangle_index(0, 16)); }
FW_DEVICE void find_alike_keys(float* t) {
  const int lane = static_cast<int>(lane_index());
  const float2 x = *reinterpret_cast<const float2*>(t + triangle_index(8 + lane / 4, 2 * (lane % 4)));
  const uint32_t lanes = warp_ballot(max(fabsf(x.x), fabsf(x.y)) > kAlikeEntry);
  if (lane == 0) alike_lanes(t) = lanes;
}
FW_DEVICE bool keys_are_alike(float* t) { return std::popcount(alike_lanes(t)) >= kAlikeLanes; }

// 16 columns of A into the SW128 tile a by one warp, and zeros above the diagonal blocks. Every row from token 16 on
// is rounded before the rows below are made of it.
FW_DEVICE void rounded_columns(float* t, char* a, int warp) {
  if (warp == 0) {
    invert_diagonal(t, 0);
    store_diagonal<false>(t, a, {}, 0);
    sync_warp();
  }
  FW_NO_UNROLL
  for (int block = 1; block < 4; ++block) {
    const int lane = opaque(static_cast<int>(lane_index())), g = lane >> 2, k = lane & 3, column = lane & 15;
    const auto at = [&](int row, int j) { return a + atom_offset(row, 2 * warp + (j >> 3)) + 2 * (j & 7); };
    const auto entry = [&](int row, int j) {
      return static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(at(row, j))) << 16;
    };
    if (block < warp) {
      *reinterpret_cast<uint4*>(at(16 * block + lane / 2, 8 * (lane % 2))) = make_uint4(0, 0, 0, 0);
      continue;
    }
    float x[16];
    FW_UNROLL
    for (int n = 0; n < 2; ++n) {
      float sums[4] = {};  // (T A)^T of the rows above: 16 columns, 8 rows
      FW_NO_UNROLL
      for (int above = 16 * warp; above < 16 * block; above += 8) {
        const int m = above + k;
        const uint32_t left[4] = {entry(m, g), entry(m, g + 8), entry(m + 4, g), entry(m + 4, g + 8)};
        const float* row = t + triangle_index(16 * block + 8 * n + g, m);
        mma_tf32(sums, left, nearest_tf32(row[0]), nearest_tf32(row[4]));
      }
      FW_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int from = 4 * (column & 7) + i / 2;
        const float low = shuffle(sums[i % 2], from), high = shuffle(sums[2 + i % 2], from);
        x[8 * n + i] = (block == warp && 8 * n + i == column ? 1.0f : 0.0f) - (column < 8 ? low : high);
      }
    }
    substitute<true>(t + triangle_index(16 * block, 16 * block), triangle_stride(block), x);
    const int own = opaque(static_cast<int>(lane_index())), odd = own >> 4;
    char* const to = a + 2 * (own & 7);
    FW_UNROLL
    for (int i = 0; i < 16; i += 2)
      *reinterpret_cast<uint16_t*>(to + atom_offset(16 * block + i + odd, 2 * warp + ((own & 15) >> 3))) =
          bf16_bits(odd == 0 ? x[i] : x[i + 1]);
    sync_warp();
  }
}

// By warps 4 to 7 while the others are in invert(). Between two barriers of the block every warp waits at others
// equally often, for compute-sanitizer's racecheck counts that to order what they do. Its synccheck wants those that
// wait at one barrier to be at one point of the code.
template <bool kHiLo>
FW_DEVICE void overlap_invert() {
  if constexpr (!kHiLo) named_barrier_sync(kInverseBarrier + 3, 128);
  named_barrier_sync(kInverseBarrier + 3, 128);
  named_barrier_sync(kInverseBarrier + 3, 128);
}

// T becomes A in the SW128 tile a, by warps 0 to 3, which wrote the 16 rows of T of their number themselves. What is
// left in t is neither. Warps 0 and 2 return while 1 and 3 go on. Before a warp writes to a it calls wait_for_a. kHiLo:
// products of operands in full; the SW128 tile of what bf16 leaves out has nothing in the blocks above the diagonal.
template <bool kHiLo, class Wait>
FW_DEVICE void invert(float* t, char* a, const HiLoInverse& hi_lo, int warp, Wait&& wait_for_a) {
  const int lane = static_cast<int>(lane_index()), pair = warp >> 1, first = 32 * pair;
  const uint32_t sw128 = shared_address(a);
  sync_warp();
  if constexpr (!kHiLo) {
    if (warp == 0) find_alike_keys(t);
    named_barrier_sync(kInverseBarrier, 128);
    if (keys_are_alike(t)) [[unlikely]] {
      wait_for_a();
      rounded_columns(t, a, warp);
      named_barrier_sync(kInverseBarrier, 128);
      return named_barrier_sync(kInverseBarrier, 128);
    }
  }
  invert_diagonal(t, warp);
  wait_for_a();
  store_diagonal<kHiLo>(t, a, hi_lo, warp);
  named_barrier_sync(kInverseBarrier, 128);
  if (warp % 2 == 0) return named_barrier_sync(kInverseBarrier + 1, 64);
  float small[2][4];
  below_diagonal<16, kHiLo>(t, first, 0, small);
  sync_warp();
  FW_UNROLL
  for (int n = 0; n < 2; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i)
      t[triangle_index(first + 16 + 8 * n + 2 * (lane & 3) + (i & 1), first + (lane >> 2) + (i >> 1) * 8)] =
          -small[n][i];
  }
  store_below_diagonal<16, kHiLo>(sw128, hi_lo, first, 0, small);
  named_barrier_sync(kInverseBarrier + 2, 64);
  float large[4][4];
  below_diagonal<32, kHiLo>(t, 0, 16 * pair, large);
  store_below_diagonal<32, kHiLo>(sw128, hi_lo, 0, 16 * pair, large);
}

}  // namespace fw::cuda
