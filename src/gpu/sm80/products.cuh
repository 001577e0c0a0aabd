// Products of four warps by mma.sync: fragments (gpu/sm80/fragments.cuh) times SW128 tiles in shared memory, which
// every warp loads by ldmatrix. What sm90/fragments.cuh does by wgmma, with the same operands and sums; these are over
// when they return.
#pragma once

#include "gpu/sm80/fragments.cuh"
#include "gpu/sw128_atoms.cuh"

namespace fw::cuda {

// Eight columns of an accumulator.
template <int kN>
FW_DEVICE float (&columns_of(float (&d)[kN], int tile))[4] {
  return *reinterpret_cast<float(*)[4]>(d + 4 * tile);
}

template <int kN>
FW_DEVICE void clear_sums(float (&d)[kN]) {
  FW_UNROLL
  for (int i = 0; i < kN; ++i) d[i] = 0;
}

// d [64, 2 kN] += a [64, kSteps 16] times the transpose of the SW128 tiles of b [2 kN, kSteps 16].
template <int kN, int kSteps>
FW_DEVICE void mma_rows(float (&d)[kN], const uint32_t (&a)[kSteps][4], uint32_t b) {
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    FW_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, b_fragment(b, 16 * n, 2 * k));
      mma_bf16(columns_of(d, 2 * n), a[k], right[0], right[1]);
      mma_bf16(columns_of(d, 2 * n + 1), a[k], right[2], right[3]);
    }
  }
}

// The same of a in hi and lo parts: a + a_lo times b. Each tile is loaded once, and no product waits for the one in
// front of it.
template <int kSteps>
FW_DEVICE void mma_hi_lo_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], const uint32_t (&a_lo)[kSteps][4],
                              uint32_t b) {
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    uint32_t right[4][4];
    FW_UNROLL
    for (int n = 0; n < 4; ++n) ldmatrix_x4(right[n], b_fragment(b, 16 * n, 2 * k));
    FW_UNROLL
    for (int part = 0; part < 2; ++part) {
      const uint32_t(&left)[4] = part == 0 ? a[k] : a_lo[k];
      FW_UNROLL
      for (int n = 0; n < 4; ++n) {
        mma_bf16(columns_of(d, 2 * n), left, right[n][0], right[n][1]);
        mma_bf16(columns_of(d, 2 * n + 1), left, right[n][2], right[n][3]);
      }
    }
  }
}

// d [64, kColumns] += left right over 64 summed numbers. left: tile [row][summed], or its transpose; right: tile
// [column][summed], or its transpose, from any column that is a multiple of 16 or any row that is one of 8 on.
template <int kColumns, bool kLeftTransposed, bool kRightTransposed>
FW_DEVICE void mma_tiles(float (&d)[kColumns / 2], uint32_t left, uint32_t right) {
  const uint32_t tile = right & ~127u;
  const int atom = static_cast<int>(right & 127u) / 16, row = 16 * warp_in_group();
  FW_NO_UNROLL  // operands of one step at a time: registers
      for (int k = 0; k < 4; ++k) {
    uint32_t a[4];
    if constexpr (kLeftTransposed) {
      ldmatrix_x4_trans(a, a_fragment_trans(left, 16 * k, row / 8));
    } else {
      ldmatrix_x4(a, a_fragment(left, row, 2 * k));
    }
    FW_UNROLL
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      if constexpr (kRightTransposed) {
        ldmatrix_x4_trans(b, b_fragment_trans(tile, 16 * k, atom + 2 * n));
      } else {
        ldmatrix_x4(b, b_fragment(tile, 16 * n, 2 * k));
      }
      mma_bf16(columns_of(d, 2 * n), a, b[0], b[1]);
      mma_bf16(columns_of(d, 2 * n + 1), a, b[2], b[3]);
    }
  }
}

// d [64, 2 kN] += a [64, 64 tokens] times the SW128 tiles of b [64 tokens, 2 kN]; first: of b's columns, a multiple of
// 16.
template <int kN>
FW_DEVICE void mma_outer(float (&d)[kN], const uint32_t (&a)[4][4], uint32_t b, int first = 0) {
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    FW_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, b_fragment_trans(b, 16 * k, first / 8 + 2 * n));
      mma_bf16(columns_of(d, 2 * n), a[k], right[0], right[1]);
      mma_bf16(columns_of(d, 2 * n + 1), a[k], right[2], right[3]);
    }
  }
}

// The same of a in hi and lo parts, as mma_hi_lo_rows().
template <int kN>
FW_DEVICE void mma_hi_lo_outer(float (&d)[kN], const uint32_t (&a)[4][4], const uint32_t (&a_lo)[4][4], uint32_t b) {
  constexpr int kTogether = 4;
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    FW_UNROLL
    for (int first = 0; first < kN / 8; first += kTogether) {
      uint32_t right[kTogether][4];
      FW_UNROLL
      for (int n = 0; n < kTogether; ++n) ldmatrix_x4_trans(right[n], b_fragment_trans(b, 16 * k, 2 * (first + n)));
      FW_UNROLL
      for (int part = 0; part < 2; ++part) {
        const uint32_t(&left)[4] = part == 0 ? a[k] : a_lo[k];
        FW_UNROLL
        for (int n = 0; n < kTogether; ++n) {
          mma_bf16(columns_of(d, 2 * (first + n)), left, right[n][0], right[n][1]);
          mma_bf16(columns_of(d, 2 * (first + n) + 1), left, right[n][2], right[n][3]);
        }
      }
    }
  }
}

}  // namespace fw::cuda
