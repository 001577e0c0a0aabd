// Operands of matrix products in tiles of 64 rows (sw128.h: SW128 tiles of 64 columns, atoms of 16 bytes exchanged by
// XOR with the row), by ldmatrix. A tile is given by its shared address, at a multiple of 1024 bytes; rows and columns
// of a corner are multiples of 8. Columns of 16 where 16 columns are taken: then the lane's atom differs from lane to
// lane by XOR alone.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/sw128.h"

namespace fw::cuda {

FW_DEVICE uint32_t sw128_offset(int row, int column) {
  return static_cast<uint32_t>((column >> 6) * kSw128Bytes + row * 128 + ((((column >> 3) & 7) ^ (row & 7)) << 4) +
                               (column & 7) * 2);
}

// Lane 8 i + l reads row l of the 8x8 matrix i. In order: matrices below each other first ...
FW_DEVICE uint32_t down_then_right(uint32_t tile, int row, int column, int lane) {
  const int atom = (((lane >> 4) ^ lane) & 1) | (lane & 6);
  return tile + ((column >> 6) * kSw128Bytes + row * 128) + ((lane & 15) * 128 + ((atom << 4) ^ ((column & 48) << 1)));
}
// ... or alongside each other first.
FW_DEVICE uint32_t right_then_down(uint32_t tile, int row, int column, int lane) {
  const int atom = (((lane >> 3) ^ lane) & 1) | (lane & 6);
  return tile + ((column >> 6) * kSw128Bytes + row * 128) +
         ((((lane & 16) >> 1) + (lane & 7)) * 128 + ((atom << 4) ^ ((column & 48) << 1)));
}

// Left operand, 16 rows m x 16 columns k, of a tile [m, k] or of the transpose of a tile [k, m].
FW_DEVICE void load_left(uint32_t (&a)[4], uint32_t tile, int m, int k, int lane) {
  ldmatrix_x4(a, down_then_right(tile, m, k, lane));
}
FW_DEVICE void load_left_transposed(uint32_t (&a)[4], uint32_t tile, int m, int k, int lane) {
  ldmatrix_x4_trans(a, right_then_down(tile, k, m, lane));
}

// Right operand, 16 rows k x 16 columns n (b[0], b[1]: the first 8 columns), of a tile [k, n].
FW_DEVICE void load_right(uint32_t (&b)[4], uint32_t tile, int k, int n, int lane) {
  ldmatrix_x4_trans(b, down_then_right(tile, k, n, lane));
}

}  // namespace fw::cuda
