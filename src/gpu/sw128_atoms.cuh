// Matrices of 64 rows in shared memory as the SW128 tiles of sw128.h, and their fragments for mma_bf16. A atom is 16
// bytes: 8 columns.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/sw128.h"

namespace fw::cuda {

FW_DEVICE uint32_t atom_offset(int row, int atom) {
  return static_cast<uint32_t>((atom >> 3) * kSw128Bytes + row * 128 + (((atom ^ row) & 7) << 4));
}

// Fragments of 16x16 pieces; atom: of the piece's first column. Each gives the address that this lane hands to
// ldmatrix_x4.
//
// a: left operand, 16 rows from `row`, columns are the summed index. b: right operand given as [column of the
// result][summed index]: {0, 1} for 8 columns of the result, {2, 3} for the next 8.
//
// base: a multiple of 1024; atom: even. Written so that what depends on the lane is one number, and pieces of other
// rows are constants away.
FW_DEVICE uint32_t fragment_offset(uint32_t lane_part, int row, int atom) {
  return (lane_part ^ static_cast<uint32_t>((atom & 7) << 4)) +
         static_cast<uint32_t>(row * 128 + (atom >> 3) * kSw128Bytes);
}
FW_DEVICE uint32_t a_fragment(uint32_t base, int row, int atom, uint32_t lane = lane_index()) {
  return fragment_offset(base + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4), row, atom);
}
FW_DEVICE uint32_t b_fragment(uint32_t base, int row, int atom) {
  const uint32_t lane = lane_index();
  return fragment_offset(base + ((lane & 7) + (lane >> 4) * 8) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4), row,
                         atom);
}
// With _trans: left operand whose transpose [summed index][row of the result] lies in memory, also where
// stmatrix_x4_trans puts a result made that way. Right operand that lies as [summed index][column of the result].
FW_DEVICE uint32_t a_fragment_trans(uint32_t base, int row, int atom) { return b_fragment(base, row, atom); }
FW_DEVICE uint32_t b_fragment_trans(uint32_t base, int row, int atom) { return a_fragment(base, row, atom); }

}  // namespace fw::cuda
