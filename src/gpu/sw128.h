// The layout of 16-bit matrices in shared memory, as wgmma and TMA take it. A SW128 tile is 64 rows x 64 columns, 128
// bytes a row, its 16-byte atoms exchanged within a row by XOR with the row's last three bits: the 128-byte swizzle.
// Wider matrices are several tiles, one after the other. In shared memory tiles lie at multiples of 1024 bytes.
#pragma once

namespace fw::cuda {

inline constexpr int kSw128Elements = 64 * 64;  // elements
inline constexpr int kSw128Bytes = 2 * kSw128Elements;

// Element of matrix entry (row, column), any number of columns.
constexpr int sw128_index(int row, int column) {
  return column / 64 * kSw128Elements + row * 64 + (((column % 64) / 8) ^ (row & 7)) * 8 + column % 8;
}

constexpr int round_to_sw128(int bytes) { return (bytes + 1023) / 1024 * 1024; }

}  // namespace fw::cuda
