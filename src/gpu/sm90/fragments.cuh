// Products of fragments (gpu/sm80/fragments.cuh) with SW128 tiles in shared memory by wgmma (wgmma.cuh). Four warps, a
// warpgroup, hold 64 rows: 16 a warp.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "gpu/sw128.h"

namespace fw::cuda {

// ---- Products: the state's warps issue them, see wgmma.cuh ---------------------------------------------------------------------

// The descriptor of what lies so many bytes further: cheaper than a new one.
FW_DEVICE uint64_t descriptor_after(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16));
}

// d [64, 64] = (or +=) a [64, kSteps 16] times the transpose of the SW128 tiles of b [64, kSteps 16].
template <int kSteps>
FW_DEVICE void multiply_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], uint32_t b, bool accumulate) {
  const uint64_t first = wgmma_descriptor(b, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kSteps; ++k)
    wgmma_rs<64, false>(d, a[k], descriptor_after(first, k / 4 * kSw128Bytes + k % 4 * 32), accumulate || k > 0);
}

// d [64, 64] = (or +=) a [64, 64 tokens] times the SW128 tile of b [64 tokens, 64].
FW_DEVICE void multiply_outer(float (&d)[32], const uint32_t (&a)[4][4], uint32_t b, bool accumulate = false) {
  const uint64_t first = wgmma_descriptor(b, kSw128Bytes, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_rs<64, true>(d, a[k], descriptor_after(first, k * 2048), accumulate || k > 0);
}

// d [64, kTileK] += a [64, 64 tokens] times the SW128 tiles of b [64 tokens, kTileK].
template <int kTileK>
FW_DEVICE void add_outer(float (&d)[kTileK / 2], const uint32_t (&a)[4][4], uint32_t b) {
  const uint64_t first = wgmma_descriptor(b, kSw128Bytes, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_rs<kTileK, true>(d, a[k], descriptor_after(first, k * 2048), true);
}

// The same of operands with lo parts (LoTiles): a + a_lo times b, and a times what lies at b_lo, if that is there;
// without the product of two lo parts.
template <int kSteps>
FW_DEVICE void multiply_hi_lo_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], const uint32_t (&a_lo)[kSteps][4],
                                   uint32_t b, uint32_t b_lo, bool has_b_lo) {
  multiply_rows(d, a, b, false);
  multiply_rows(d, a_lo, b, true);
  if (has_b_lo) {
    wgmma_fence();  // here and below: where ways part and meet the compiler wants to see it
    multiply_rows(d, a, b_lo, true);
  }
  wgmma_fence();
}
template <int kTileK>
FW_DEVICE void add_hi_lo_outer(float (&d)[kTileK / 2], const uint32_t (&a)[4][4], const uint32_t (&a_lo)[4][4],
                               uint32_t b, uint32_t b_lo) {
  add_outer<kTileK>(d, a, b);
  add_outer<kTileK>(d, a_lo, b);
  add_outer<kTileK>(d, a, b_lo);
}

}  // namespace fw::cuda
