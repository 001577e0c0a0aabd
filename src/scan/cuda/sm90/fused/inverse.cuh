// A = (I + T)^-1 diag(f) of a chunk in blocks of 16 rows, by four warps. Warp w inverts diagonal block w and then makes
// block column w, transposed: A_ij^T = -(sum over m from j to i - 1 of A_mj^T T_im^T) D_i^T with D_i = (I + T_ii)^-1.
#pragma once

#include "scan/cuda/sm90/fused/shape.cuh"

namespace fw::cuda {

// (I + T)^-1 of the warp's diagonal block, whose rows lie at `rows`: column lane % 16 of it, by forward substitution in
// float32. The entries of T are read in pieces of four columns, four pieces ahead.
FW_DEVICE void invert_diagonal(const char* rows, int column, float (&x)[16]) {
  FW_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
  constexpr int kAhead = 4, kPieces = 36;
  float4 t[2][kAhead];
  // Piece n has columns 4 q to 4 q + 3 of row i; the 15 rows below the first come first, then 11, 7 and 3.
  const auto quarter = [](int n) { return n < 15 ? 0 : n < 26 ? 1 : n < 33 ? 2 : 3; };
  const auto row_of_piece = [](int n) {
    const int q = n < 15 ? 0 : n < 26 ? 1 : n < 33 ? 2 : 3;
    return n - (q == 0 ? 0 : q == 1 ? 15 : q == 2 ? 26 : 33) + 4 * q + 1;
  };
  const auto fetch = [&](int first) {
    FW_UNROLL
    for (int n = first; n < first + kAhead && n < kPieces; ++n)
      t[n / kAhead & 1][n % kAhead] =
          *reinterpret_cast<const float4*>(rows + row_of_piece(n) * FusedShape::kDiagonalRow + quarter(n) * 16);
  };
  fetch(0);
  FW_UNROLL
  for (int first = 0; first < kPieces; first += kAhead) {
    fetch(first + kAhead);
    FW_UNROLL
    for (int n = first; n < first + kAhead && n < kPieces; ++n) {
      const int i = row_of_piece(n), j = 4 * quarter(n);
      const float4 piece = t[n / kAhead & 1][n % kAhead];
      x[i] -= piece.x * x[j];
      if (j + 1 < i) x[i] -= piece.y * x[j + 1];
      if (j + 2 < i) x[i] -= piece.z * x[j + 2];
      if (j + 3 < i) x[i] -= piece.w * x[j + 3];
    }
  }
}

// Stores the inverse twice, times `factor`, with rows and columns exchanged. Lanes 0 to 15 store it into the diagonal
// block of T's tile for block_column(); lanes 16 to 31 by way of `scratch` into that of A's tile. Leaves in `a` what
// the lane holds of A_ww^T as a left operand.
FW_DEVICE void store_diagonal(const float (&x)[16], float factor, char* t_tile, char* scratch, uint32_t a_tile,
                              const FusedLane& own, uint32_t (&a)[4]) {
  const int column = own.lane & 15;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    char* const to = own.lane < 16 ? t_tile + sw128_offset(16 * own.warp + column, 16 * own.warp + 8 * half)
                                   : scratch + column * FusedShape::kInverseRow + half * 16;
    uint32_t y[4];
    FW_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = pack_bf16(x[8 * half + 2 * i] * factor, x[8 * half + 2 * i + 1] * factor);
    if (half == 0) sync_warp();  // the block's rows have been read, which `scratch` takes the place of
    *reinterpret_cast<uint4*>(to) = make_uint4(y[0], y[1], y[2], y[3]);
  }
  sync_warp();
  ldmatrix_x4(
      a, shared_address(scratch) + static_cast<uint32_t>(((own.matrix & 1) * 8 + own.line) * FusedShape::kInverseRow +
                                                         (own.matrix >> 1) * 16));
  stmatrix_x4_trans(a_tile + own.right(16 * own.warp, 2 * own.warp), a);
}

// Block column w of A below the diagonal. a: A_ww^T. Each sum is made as soon as what it adds is there.
FW_DEVICE void block_column(uint32_t t_tile, uint32_t a_tile, const FusedLane& own, uint32_t (&a)[4]) {
  float sums[3][2][4] = {};
  FW_UNROLL
  for (int d = 1; d < 4; ++d) {
    if (own.warp + d > 3) break;
    FW_UNROLL
    for (int e = d; e < 4; ++e) {
      if (own.warp + e > 3) break;
      uint32_t t[4];
      ldmatrix_x4(t, t_tile + own.down(16 * (own.warp + e), 2 * (own.warp + d - 1)));
      mma_bf16(sums[e - 1][0], a, t[0], t[2]);
      mma_bf16(sums[e - 1][1], a, t[1], t[3]);
    }
    const int i = own.warp + d;
    const float(&sum)[2][4] = sums[d - 1];
    const uint32_t left[4] = {pack_bf16(sum[0][0], sum[0][1]), pack_bf16(sum[0][2], sum[0][3]),
                              pack_bf16(sum[1][0], sum[1][1]), pack_bf16(sum[1][2], sum[1][3])};
    float y[2][4] = {};
    uint32_t t[4];
    ldmatrix_x4_trans(t, t_tile + own.right(16 * i, 2 * i));
    mma_bf16(y[0], left, t[0], t[2]);
    mma_bf16(y[1], left, t[1], t[3]);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) a[m] = pack_bf16(-y[m / 2][m % 2 * 2], -y[m / 2][m % 2 * 2 + 1]);
    stmatrix_x4_trans(a_tile + own.right(16 * i, 2 * own.warp), a);
  }
}

}  // namespace fw::cuda
