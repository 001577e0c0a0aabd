// What scalar and channel decay share once the products of T and P are there: both to shared memory, the products of
// the chunk tiles, the Z chunk tile.
#pragma once

#include "gpu/sm80/stores.cuh"
#include "gpu/sw128_atoms.cuh"
#include "scan/cuda/common/front/chunk.cuh"
#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/prepare/inverse.cuh"

namespace fw::cuda {

enum class RowDecays { kExact, kBounded };  // of channels: whether a decay of a warp's rows had to be bounded

// Tiles of 8 columns (tile n: columns 8 n .. 8 n + 7) of the 16 rows of a block, as accumulators: of T into the
// triangle, of P and M into a SW128 tile. Tiles 2 block and 2 block + 1 are cut at the diagonal: selected, not
// multiplied, since above it may be anything.
struct TriangleRows {
  float* first;
  int step;  // to the row 8 below
};
FW_DEVICE TriangleRows triangle_rows(char* t, int block) {
  const int lane = static_cast<int>(lane_index());
  return {reinterpret_cast<float*>(t) + triangle_index(16 * block + (lane >> 2), 2 * (lane & 3)),
          8 * triangle_stride(block)};
}
FW_DEVICE void store_tile(const TriangleRows& rows, int n, const float (&c)[4]) {
  *reinterpret_cast<float2*>(rows.first + 8 * n) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(rows.first + 8 * n + rows.step) = make_float2(c[2], c[3]);
}
FW_DEVICE uint32_t sw128_rows(int block) {
  const uint32_t lane = lane_index();
  return static_cast<uint32_t>(16 * block * 128) + (lane >> 2) * 128 + (lane >> 2) * 16 + 4 * (lane & 3);
}
FW_DEVICE void store_tile(char* sw128, uint32_t rows, int n, const float (&c)[4]) {
  char* to = sw128 + (rows ^ static_cast<uint32_t>(n << 4));
  *reinterpret_cast<uint32_t*>(to) = pack_bf16(c[0], c[1]);
  *reinterpret_cast<uint32_t*>(to + 1024) = pack_bf16(c[2], c[3]);
}
// What that rounds off, into another SW128 tile.
FW_DEVICE void store_lo(char* sw128, uint32_t rows, int n, const float (&c)[4]) {
  char* to = sw128 + (rows ^ static_cast<uint32_t>(n << 4));
  *reinterpret_cast<uint32_t*>(to) = pack_lo(pack_bf16(c[0], c[1]), c[0], c[1]);
  *reinterpret_cast<uint32_t*>(to + 1024) = pack_lo(pack_bf16(c[2], c[3]), c[2], c[3]);
}
// odd: the second tile of the block; kStrict: the diagonal too is cut.
template <bool kStrict>
FW_DEVICE void cut_tile(int odd, float (&c)[4]) {
  const int lane = static_cast<int>(lane_index()), i = lane >> 2, j = 8 * odd + 2 * (lane & 3) + (kStrict ? 1 : 0);
  c[0] = j <= i ? c[0] : 0.0f, c[1] = j + 1 <= i ? c[1] : 0.0f;
  c[2] = j <= i + 8 ? c[2] : 0.0f, c[3] = j + 1 <= i + 8 ? c[3] : 0.0f;
}

// Zeros in the 16x16 blocks above the diagonal of a SW128 tile, by all threads.
FW_DEVICE void clear_above(char* sw128) {
  const int row = static_cast<int>(thread_index()) >> 2, block = static_cast<int>(thread_index()) & 3;
  if (block > row >> 4) {
    *reinterpret_cast<uint4*>(sw128 + atom_offset(row, 2 * block)) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(sw128 + atom_offset(row, 2 * block + 1)) = make_uint4(0, 0, 0, 0);
  }
}

// A float32 factor as the sum of two bf16 values, 16 bits of it: a product of a bf16 number with it is rounded once,
// but for 2^-9 of a rounding.
struct SplitFactor {
  uint32_t high, low;  // each twice
};
FW_DEVICE SplitFactor split_factor(float x) {
  const uint32_t high = pack_bf16(x, x);
  const float lo = x - bf16_low(high);
  return {high, pack_bf16(lo, lo)};
}
FW_DEVICE uint32_t times(uint32_t x, const SplitFactor& factor) {
  return fma_bf16x2(x, factor.high, mul_bf16x2(x, factor.low));
}
inline constexpr uint32_t kSigns = 0x80008000u, kOnes = 0x3f803f80u;
// What that rounds off.
FW_DEVICE uint32_t lo_of_times(uint32_t x, const SplitFactor& factor) {
  return fma_bf16x2(x, factor.low, fma_bf16x2(x, factor.high, times(x, factor) ^ kSigns));
}
FW_DEVICE uint4 times(const uint4& x, const SplitFactor& f) {
  return make_uint4(times(x.x, f), times(x.y, f), times(x.z, f), times(x.w, f));
}

// The same of all rows.
struct SplitFactors {
  uint16_t high[kChunk], low[kChunk];
};
FW_DEVICE void split_into(SplitFactors& factors, int row, float x) {
  factors.high[row] = bf16_bits(x);
  factors.low[row] = bf16_bits(x - bf16_value(factors.high[row]));
}
// A fragment of a_fragment_trans: tokens `row` .. row + 15 each times their factor, or (lo) what that rounds off.
FW_DEVICE void times_rows(uint32_t (&x)[4], const SplitFactors& factors, int row, bool lo) {
  const int first = row + 2 * (static_cast<int>(lane_index()) & 3);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const SplitFactor f = {*reinterpret_cast<const uint32_t*>(factors.high + first + 8 * half),
                           *reinterpret_cast<const uint32_t*>(factors.low + first + 8 * half)};
    if (lo) {
      x[2 * half] = lo_of_times(x[2 * half], f), x[2 * half + 1] = lo_of_times(x[2 * half + 1], f);
    } else {
      x[2 * half] = times(x[2 * half], f), x[2 * half + 1] = times(x[2 * half + 1], f);
    }
  }
}

// What times_rows() and the rounding of the numbers themselves leave out; lo parts: those numbers' own, channels slice
// of tokens row .. row + 15 in the matrix `lo parts`, or 0: none.
FW_DEVICE void lo_of_rows(uint32_t (&x)[4], const SplitFactors& factors, int row, uint32_t lo_parts, int slice) {
  times_rows(x, factors, row, true);
  if (lo_parts == 0) return;
  uint32_t own[4];
  ldmatrix_x4_trans(own, a_fragment_trans(lo_parts, row, 2 * slice));
  times_rows(own, factors, row, false);
  FW_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = fma_bf16x2(own[i], kOnes, x[i]);
}

// 16 channels of 64 tokens as the products below leave them, into a matrix of bf16 values.
FW_DEVICE void store_slice(uint32_t matrix, int slice, const uint32_t (&x)[4][4]) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) store_matrices<true>(a_fragment_trans(matrix, 16 * j, 2 * slice), x[j]);
}

FW_DEVICE void clear_tiles(float (&x)[8][4]) {
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    FW_UNROLL
    for (int m = 0; m < 4; ++m) x[n][m] = 0;
  }
}

// A matrix as a SW128 tile of bf16 values and, if fine, one of what that rounding leaves out: shared addresses. Then a
// product of two such matrices is that of the SW128 tiles and both of one's SW128 tile with the other's lo: three
// rounds; key_rounds: with keys, two if those leave out nothing. If not fine: more than one with what keys times their
// factors leave out.
struct SplitSw128 {
  uint32_t high, low;
  int key_rounds = 3;
};

// 16 channels of A^T K in place of those of K (both [64 tokens, key]); no other warp touches these channels. factors,
// if not null: of the rows of K. middle(sums) once tokens 0 to 31 are in (neither kHiLo nor kScaled). lo_parts: of K,
// or 0 (kScaled: 0). out_lo: of kHiLo, what the result leaves out.
template <bool kScaled, bool kHiLo, class Middle>
FW_DEVICE void transform_keys(uint32_t keys, const SplitFactors* factors, const SplitSw128& a, int slice,
                              Middle&& middle, uint32_t lo_parts = 0, uint32_t (*out_lo)[4] = nullptr) {
  float x[8][4];
  clear_tiles(x);
  const int rounds = kHiLo ? a.key_rounds : kScaled ? min(a.key_rounds, 2) : 1;
  const int parts = !kHiLo && !kScaled && lo_parts != 0 ? 2 : 1;
  FW_NO_UNROLL
  for (int round = 0; round < rounds; ++round) {
    const uint32_t sw128 = kHiLo && round == 1 ? a.low : a.high;
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      FW_NO_UNROLL
      for (int part = 0; part < parts; ++part) {
        const bool lo = part > 0 || (kHiLo && !kScaled && round == 2);
        uint32_t left[4];
        ldmatrix_x4_trans(left, a_fragment_trans(lo ? lo_parts : keys, 16 * i, 2 * slice));
        if constexpr (kScaled) {
          if (round == (kHiLo ? 2 : 1)) {
            lo_of_rows(left, *factors, 16 * i, lo_parts, slice);
          } else {
            times_rows(left, *factors, 16 * i, false);
          }
        }
        FW_UNROLL
        for (int j = 0; j <= i; ++j) {
          uint32_t right[4];
          ldmatrix_x4_trans(right, b_fragment_trans(sw128, 16 * i, 2 * j));
          mma_bf16(x[2 * j], left, right[0], right[1]);
          mma_bf16(x[2 * j + 1], left, right[2], right[3]);
        }
      }
      if (!kHiLo && !kScaled && i == 1) middle(x);
    }
  }
  sync_warp();
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const uint32_t packed[4] = {pack_bf16(x[2 * j][0], x[2 * j][1]), pack_bf16(x[2 * j][2], x[2 * j][3]),
                                pack_bf16(x[2 * j + 1][0], x[2 * j + 1][1]),
                                pack_bf16(x[2 * j + 1][2], x[2 * j + 1][3])};
    store_matrices<true>(a_fragment_trans(keys, 16 * j, 2 * slice), packed);
    if constexpr (kHiLo) {
      FW_UNROLL
      for (int i = 0; i < 4; ++i)
        out_lo[j][i] = pack_lo(packed[i], x[2 * j + i / 2][i % 2 * 2], x[2 * j + i / 2][i % 2 * 2 + 1]);
    }
  }
}
template <bool kScaled>
FW_DEVICE void transform_keys(uint32_t keys, const SplitFactors* factors, const SplitSw128& a, int slice) {
  transform_keys<kScaled, false>(keys, factors, a, slice, [](float(&)[8][4]) {});
}

// How -E, Q and Khat lie in shared memory: as they are; what they are multiples of, row by row.
enum class RowForm { kStreams, kMultiples };

// Where transform_reads finds and leaves things, and the factors of their rows' form. y may be minus_e. kHiLo: e_lo: of
// minus_e, or (kMultiples) 0; y_lo: what y leaves out, may be e_lo.
struct ReadBuffers {
  uint32_t minus_e, q, y;
  const SplitFactors* e_factors;
  const float* q_factors;
  uint32_t e_lo = 0, y_lo = 0;
};

// 16 channels: Y = A E, and Q - P Y in place of Q.
template <RowForm kForm, bool kHiLo>
FW_DEVICE void transform_reads(const ReadBuffers& s, const SplitSw128& a, uint32_t p, int slice) {
  const int pair = static_cast<int>(lane_index()) & 3;
  float y[8][4];
  clear_tiles(y);
  FW_NO_UNROLL
  for (int round = 0; round < (kHiLo ? a.key_rounds : 1); ++round) {
    const uint32_t sw128 = kHiLo && round == 1 ? a.low : a.high;
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t rows[4];
      ldmatrix_x4_trans(rows, a_fragment_trans(kHiLo && kForm == RowForm::kStreams && round == 2 ? s.e_lo : s.minus_e,
                                               16 * j, 2 * slice));
      if constexpr (kForm == RowForm::kMultiples) {
        if (kHiLo && round == 2) {
          lo_of_rows(rows, *s.e_factors, 16 * j, s.e_lo, slice);
        } else {
          times_rows(rows, *s.e_factors, 16 * j, false);
        }
      }
      FW_UNROLL
      for (int i = j; i < 4; ++i) {
        uint32_t right[4];
        ldmatrix_x4(right, b_fragment(sw128, 16 * i, 2 * j));
        mma_bf16(y[2 * i], rows, right[0], right[1]);
        mma_bf16(y[2 * i + 1], rows, right[2], right[3]);
      }
    }
  }
  sync_warp();
  uint32_t left[4][4];
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {  // -Y is the next product's left operand as it stands
    left[i][0] = pack_bf16(y[2 * i][0], y[2 * i][1]), left[i][1] = pack_bf16(y[2 * i][2], y[2 * i][3]);
    left[i][2] = pack_bf16(y[2 * i + 1][0], y[2 * i + 1][1]), left[i][3] = pack_bf16(y[2 * i + 1][2], y[2 * i + 1][3]);
    const uint32_t plus[4] = {left[i][0] ^ kSigns, left[i][1] ^ kSigns, left[i][2] ^ kSigns, left[i][3] ^ kSigns};
    store_matrices<true>(a_fragment_trans(s.y, 16 * i, 2 * slice), plus);
    if constexpr (kHiLo) {
      uint32_t lo[4];
      FW_UNROLL
      for (int n = 0; n < 4; ++n)
        lo[n] = pack_lo(left[i][n], y[2 * i + n / 2][n % 2 * 2], y[2 * i + n / 2][n % 2 * 2 + 1]) ^ kSigns;
      store_matrices<true>(a_fragment_trans(s.y_lo, 16 * i, 2 * slice), lo);
    }
    uint32_t reads[4];
    ldmatrix_x4_trans(reads, a_fragment_trans(s.q, 16 * i, 2 * slice));
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + 2 * pair;
      float(&tile)[4] = y[2 * i + half];
      float2 f = make_float2(1, 1);
      if constexpr (kForm == RowForm::kMultiples) f = *reinterpret_cast<const float2*>(s.q_factors + row);
      tile[0] = f.x * bf16_low(reads[2 * half]), tile[1] = f.y * bf16_high(reads[2 * half]);
      tile[2] = f.x * bf16_low(reads[2 * half + 1]), tile[3] = f.y * bf16_high(reads[2 * half + 1]);
    }
  }
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    FW_UNROLL
    for (int j = 0; j <= i; ++j) {
      uint32_t right[4];
      ldmatrix_x4(right, b_fragment(p, 16 * i, 2 * j));
      mma_bf16(y[2 * i], left[j], right[0], right[1]);
      mma_bf16(y[2 * i + 1], left[j], right[2], right[3]);
    }
  }
  sync_warp();
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t packed[4] = {pack_bf16(y[2 * i][0], y[2 * i][1]), pack_bf16(y[2 * i][2], y[2 * i][3]),
                                pack_bf16(y[2 * i + 1][0], y[2 * i + 1][1]),
                                pack_bf16(y[2 * i + 1][2], y[2 * i + 1][3])};
    store_matrices<true>(a_fragment_trans(s.q, 16 * i, 2 * slice), packed);
  }
}

// M = P A into the SW128 tile m: a warp has the 16 rows of a block and every second tile of 8 columns.
template <bool kHiLo>
FW_DEVICE void read_products(const SplitSw128& p, const SplitSw128& a, char* m, int warp) {
  const int lane = static_cast<int>(lane_index()), block = warp & 3, odd = warp >> 2;
  float x[4][4];
  FW_UNROLL
  for (int n = 0; n < 4; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) x[n][i] = 0;
  }
  FW_NO_UNROLL
  for (int round = 0; round < (kHiLo ? 3 : 1); ++round) {
    const uint32_t left_rows = kHiLo && round == 2 ? p.low : p.high;
    const uint32_t right_rows = (kHiLo && round == 1 ? a.low : a.high) + static_cast<uint32_t>((lane & 15) * 128) +
                                static_cast<uint32_t>((odd ^ (lane & 7)) << 4);
    FW_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (k > block) break;
      uint32_t left[4];
      ldmatrix_x4(left, a_fragment(left_rows, 16 * block, 2 * k));
      FW_UNROLL
      for (int j = 0; j <= k; ++j) {
        uint32_t right[2];
        ldmatrix_x2_trans(right, fragment_offset(right_rows, 16 * k, 2 * j));
        mma_bf16(x[j], left, right[0], right[1]);
      }
    }
  }
  const uint32_t rows = sw128_rows(block);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    if (j == block) cut_tile<false>(odd, x[j]);
    store_tile(m, rows, 2 * j + odd, x[j]);
  }
}

// Whether the rows of values and those of their gates are loaded as 16 bytes each.
FW_HOST_DEVICE inline bool whole_values(const Rows& rows, int V) {
  return rows.bf16 != 0 && ((rows.stride | V) & 7) == 0 && (reinterpret_cast<uintptr_t>(rows.data) & 15) == 0;
}

// write_values() with a gate of channels, of such rows; kAhead: loads of each that are under way together. law: of
// gates that are logits.
template <int kAhead, class RowFactor>
FW_DEVICE void write_gated_values(const Rows& values, const Rows& gates, const GateLaw<float>& law, int rows, int V,
                                  RowFactor&& z_v, uint16_t* z, int thread, int threads) {
  const int atoms = (V + kValueBlock - 1) / kValueBlock * 512;
  char* to = reinterpret_cast<char*>(z);
  for (int first = thread; first < atoms; first += kAhead * threads) {
    uint4 v[kAhead], c[kAhead];
    FW_UNROLL
    for (int n = 0; n < kAhead; ++n) {
      const int i = first + n * threads, row = (i >> 3) & 63, column = ((i & 7) + (i >> 9) * 8) * 8;
      v[n] = c[n] = make_uint4(0, 0, 0, 0);
      if (i < atoms && row < rows && column < V) {
        v[n] = *reinterpret_cast<const uint4*>(values.data + (row * values.stride + column) * 2);
        c[n] = *reinterpret_cast<const uint4*>(gates.data + (row * gates.stride + column) * 2);
      }
    }
    FW_UNROLL
    for (int n = 0; n < kAhead; ++n) {
      const int i = first + n * threads, row = (i >> 3) & 63;
      if (i >= atoms) break;
      const float f = z_v(row);
      if (law.given != GateActivation::kValue) c[n] = fused_gates(law.factor, c[n]);
      uint4 product = make_uint4(mul_bf16x2(v[n].x, c[n].x), mul_bf16x2(v[n].y, c[n].y), mul_bf16x2(v[n].z, c[n].z),
                                 mul_bf16x2(v[n].w, c[n].w));
      if (f != 1.0f) {
        const uint32_t a[4] = {v[n].x, v[n].y, v[n].z, v[n].w}, b[4] = {c[n].x, c[n].y, c[n].z, c[n].w};
        uint32_t words[4];
        FW_UNROLL
        for (int j = 0; j < 4; ++j)
          words[j] = pack_bf16(bf16_low(a[j]) * (f * bf16_low(b[j])), bf16_high(a[j]) * (f * bf16_high(b[j])));
        product = make_uint4(words[0], words[1], words[2], words[3]);
      }
      *reinterpret_cast<uint4*>(to + atom_offset(row, (i & 7) + (i >> 9) * 8)) = product;
    }
  }
}

// Z = z_v c (.) v of all value columns as SW128 tiles, 0 past V and past the chunk's rows, by threads `thread`, +
// threads, ...
// z_v(row): 0 past the chunk's rows. kAhead: as above.
template <int kAhead = 3, class RowFactor>
FW_DEVICE void write_values(const Problem& x, const ChunkCoord& coord, RowFactor&& z_v, uint16_t* z, int thread,
                            int threads) {
  const Rows values = chunk_rows(x.in.v, coord), gates = chunk_rows(x.in.write_gate, coord);
  const int atoms = (x.V + kValueBlock - 1) / kValueBlock * 512;
  const bool gate = x.rule.write == Gate::kChannel;
  char* to = reinterpret_cast<char*>(z);
  if (gate && whole_values(values, x.V) && whole_values(gates, x.V))
    return write_gated_values<kAhead>(values, gates, {}, coord.span.rows, x.V, z_v, z, thread, threads);
  for (int i = thread; i < atoms; i += threads) {
    const int row = (i >> 3) & 63, atom = (i & 7) + (i >> 9) * 8;
    float v[8], c[8];
    FW_UNROLL
    for (int j = 0; j < 8; ++j) v[j] = 0, c[j] = 1;
    if (row < coord.span.rows) {
      load_channels(values, row, atom * 8, x.V, v);
      if (gate) load_channels(gates, row, atom * 8, x.V, c);
    }
    const float f = z_v(row);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) v[j] *= f * c[j];
    *reinterpret_cast<uint4*>(to + atom_offset(row, atom)) =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}

}  // namespace fw::cuda
