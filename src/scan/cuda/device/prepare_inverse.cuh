// A = (I + T)^-1 for a strictly lower triangular T of 64 rows, float32 in shared memory: forward substitution in the diagonal
// blocks of 16, then blocks of 32 and 64 by products of TF32 operands, [A11 0; -A22 T21 A11, A22]. Never a Neumann series: its
// partial sums blow up for keys that are alike.
#pragma once

#include "scan/cuda/device/ptx.cuh"

namespace fw::cuda {

// Element of entry (i, j); four neighbouring columns stay together.
FW_DEVICE int triangle_index(int i, int j) { return i * 64 + (((j >> 2) ^ (i & 7)) << 2) + (j & 3); }

inline constexpr int kInverseBarrier = 1;

// One column of one 16x16 block a lane.
FW_DEVICE void invert_diagonal(float* t) {
  const int lane = static_cast<int>(lane_index()), column = lane & 15, first = (static_cast<int>(warp_index()) * 2 + (lane >> 4)) * 16;
  float a[16];
  FW_UNROLL
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
    FW_UNROLL
    for (int j = 0; j < i; j += 4) {
      const float4 x = *reinterpret_cast<const float4*>(t + triangle_index(first + i, first + j));
      const float row[4] = {x.x, x.y, x.z, x.w};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) {
        if (j + m < i) sum -= row[m] * a[j + m];
      }
    }
    a[i] = sum;
  }
  sync_warp();
  FW_UNROLL
  for (int i = 0; i < 16; ++i) t[triangle_index(first + i, first + column)] = a[i];
  sync_warp();
}

// The accumulator of a product with the result's columns as the next product's summed index: columns 2t and 2t + 1 of a lane
// stand where t and t + 4 are expected, so the other operand takes them in that order.
FW_DEVICE void as_left(const float (&c)[4], uint32_t (&a)[4]) { a[0] = to_tf32(c[0]), a[1] = to_tf32(c[2]), a[2] = to_tf32(c[1]), a[3] = to_tf32(c[3]); }

// Columns `column` .. + 15 of -A22 T21 A11 for blocks of kSize rows that begin at `first`, as its transpose in out (tile n: rows
// 8 n .. 8 n + 7 of the block below). What lies above the diagonal of A11 and A22 in blocks of 16 is not read.
template <int kSize>
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
    uint32_t a[4];
    a[0] = to_tf32(t[triangle_index(first + m + k, first + column + g)]);
    a[1] = to_tf32(t[triangle_index(first + m + k, first + column + g + 8)]);
    a[2] = to_tf32(t[triangle_index(first + m + k + 4, first + column + g)]);
    a[3] = to_tf32(t[triangle_index(first + m + k + 4, first + column + g + 8)]);
    FW_UNROLL
    for (int n = 0; n < kSize / 8; ++n) {
      const int row = low + 8 * n + g;
      mma_tf32(u[n], a, to_tf32(t[triangle_index(row, first + m + k)]), to_tf32(t[triangle_index(row, first + m + k + 4)]));
    }
  }
  FW_UNROLL
  for (int r = 0; r < kSize / 8; ++r) {
    uint32_t a[4];
    as_left(u[r], a);
    FW_UNROLL
    for (int n = r / 2 * 2; n < kSize / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(t + triangle_index(low + 8 * n + g, low + 8 * r + 2 * k));
      mma_tf32(out[n], a, to_tf32(x.x), to_tf32(x.y));
    }
  }
}

template <int kSize>
FW_DEVICE void store_below_diagonal(float* t, int first, int column, const float (&out)[kSize / 8][4]) {
  const int lane = static_cast<int>(lane_index()), g = lane >> 2, k = lane & 3;
  FW_UNROLL
  for (int n = 0; n < kSize / 8; ++n) {
    const int row = first + kSize + 8 * n + 2 * k;
    t[triangle_index(row, first + column + g)] = -out[n][0];
    t[triangle_index(row + 1, first + column + g)] = -out[n][1];
    t[triangle_index(row, first + column + g + 8)] = -out[n][2];
    t[triangle_index(row + 1, first + column + g + 8)] = -out[n][3];
  }
}

// T becomes A in place, by warps 0 and 1; what lies above the diagonal outside of the diagonal blocks stays as it was.
FW_DEVICE void invert(float* t) {
  const int warp = static_cast<int>(warp_index());
  invert_diagonal(t);
  float small[2][4];
  below_diagonal<16>(t, 32 * warp, 0, small);
  sync_warp();
  store_below_diagonal<16>(t, 32 * warp, 0, small);
  named_barrier_sync(kInverseBarrier, 64);
  float large[4][4];
  below_diagonal<32>(t, 0, 16 * warp, large);
  named_barrier_sync(kInverseBarrier, 64);
  store_below_diagonal<32>(t, 0, 16 * warp, large);
}

}  // namespace fw::cuda
