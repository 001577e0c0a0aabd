// What scalar and channel decay share once T and P are there: A to bf16, the products of the images, the Z image.
#pragma once

#include "scan/cuda/device/granules.cuh"
#include "scan/cuda/device/prepare_front.cuh"
#include "scan/cuda/device/prepare_inverse.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

// One 8-column tile of T (kStrict; float32) or P (bf16 panel) from an accumulator: rows 16 block + g and + 8, columns 8 n + 2 k.
template <bool kStrict>
FW_DEVICE void store_pairs(void* to, int block, int n, const float (&c)[4]) {
  const int lane = static_cast<int>(lane_index()), k = lane & 3, j = 8 * n + 2 * k;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * block + 8 * half + (lane >> 2);
    // Selected, not multiplied: what lies above the diagonal may be anything.
    if constexpr (kStrict) {
      *reinterpret_cast<float2*>(static_cast<float*>(to) + triangle_index(i, j)) = make_float2(j < i ? c[2 * half] : 0.0f, j + 1 < i ? c[2 * half + 1] : 0.0f);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<char*>(to) + granule_offset(i, n) + 4 * k) =
          pack_bf16(j <= i ? c[2 * half] : 0.0f, j + 1 <= i ? c[2 * half + 1] : 0.0f);
    }
  }
}

// A from float32 to the panel a; a_rows, if not null: with its rows times scale[64].
FW_DEVICE void round_inverse(const float* t, char* a, char* a_rows, const float* scale) {
  const int i = static_cast<int>(thread_index()) >> 2, first = (static_cast<int>(thread_index()) & 3) * 2;
  FW_UNROLL
  for (int granule = first; granule < first + 2; ++granule) {
    float x[8];
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float4 y = *reinterpret_cast<const float4*>(t + triangle_index(i, granule * 8 + half * 4));
      const float row[4] = {y.x, y.y, y.z, y.w};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) x[4 * half + m] = granule * 8 + half * 4 + m <= i ? row[m] : 0.0f;
    }
    *reinterpret_cast<uint4*>(a + granule_offset(i, granule)) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    if (a_rows != nullptr) {
      const float s = scale[i];
      *reinterpret_cast<uint4*>(a_rows + granule_offset(i, granule)) =
          make_uint4(pack_bf16(s * x[0], s * x[1]), pack_bf16(s * x[2], s * x[3]), pack_bf16(s * x[4], s * x[5]), pack_bf16(s * x[6], s * x[7]));
    }
  }
}

// 16 channels of A^T K in place of those of K (both [64 tokens, key]); no other warp touches these channels.
FW_DEVICE void transform_keys(uint32_t keys, uint32_t a, int slice) {
  uint32_t left[4][4];
  FW_UNROLL
  for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(left[i], a_fragment_trans(keys, 16 * i, 2 * slice));
  float x[8][4];
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    FW_UNROLL
    for (int m = 0; m < 4; ++m) x[n][m] = 0;
  }
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    FW_UNROLL
    for (int j = 0; j <= i; ++j) {
      uint32_t right[4];
      ldmatrix_x4_trans(right, b_fragment_trans(a, 16 * i, 2 * j));
      mma_bf16(x[2 * j], left[i], right[0], right[1]);
      mma_bf16(x[2 * j + 1], left[i], right[2], right[3]);
    }
  }
  sync_warp();
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const uint32_t packed[4] = {pack_bf16(x[2 * j][0], x[2 * j][1]), pack_bf16(x[2 * j][2], x[2 * j][3]), pack_bf16(x[2 * j + 1][0], x[2 * j + 1][1]),
                                pack_bf16(x[2 * j + 1][2], x[2 * j + 1][3])};
    stmatrix_x4_trans(a_fragment_trans(keys, 16 * j, 2 * slice), packed);
  }
}

// 16 channels: Y = A E in place of -E, and Q - P Y in place of Q.
FW_DEVICE void transform_reads(uint32_t minus_e, uint32_t q, uint32_t a, uint32_t p, int slice) {
  uint32_t left[4][4];
  FW_UNROLL
  for (int j = 0; j < 4; ++j) ldmatrix_x4_trans(left[j], a_fragment_trans(minus_e, 16 * j, 2 * slice));
  float y[8][4];
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    FW_UNROLL
    for (int m = 0; m < 4; ++m) y[n][m] = 0;
  }
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    FW_UNROLL
    for (int j = 0; j <= i; ++j) {
      uint32_t right[4];
      ldmatrix_x4(right, b_fragment(a, 16 * i, 2 * j));
      mma_bf16(y[2 * i], left[j], right[0], right[1]);
      mma_bf16(y[2 * i + 1], left[j], right[2], right[3]);
    }
  }
  sync_warp();
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {  // -Y is the next product's left operand as it stands
    left[i][0] = pack_bf16(y[2 * i][0], y[2 * i][1]), left[i][1] = pack_bf16(y[2 * i][2], y[2 * i][3]);
    left[i][2] = pack_bf16(y[2 * i + 1][0], y[2 * i + 1][1]), left[i][3] = pack_bf16(y[2 * i + 1][2], y[2 * i + 1][3]);
    constexpr uint32_t kSigns = 0x80008000u;
    const uint32_t plus[4] = {left[i][0] ^ kSigns, left[i][1] ^ kSigns, left[i][2] ^ kSigns, left[i][3] ^ kSigns};
    stmatrix_x4_trans(a_fragment_trans(minus_e, 16 * i, 2 * slice), plus);
    uint32_t reads[4];
    ldmatrix_x4_trans(reads, a_fragment_trans(q, 16 * i, 2 * slice));
    y[2 * i][0] = bf16_low(reads[0]), y[2 * i][1] = bf16_high(reads[0]), y[2 * i][2] = bf16_low(reads[1]), y[2 * i][3] = bf16_high(reads[1]);
    y[2 * i + 1][0] = bf16_low(reads[2]), y[2 * i + 1][1] = bf16_high(reads[2]);
    y[2 * i + 1][2] = bf16_low(reads[3]), y[2 * i + 1][3] = bf16_high(reads[3]);
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
    const uint32_t packed[4] = {pack_bf16(y[2 * i][0], y[2 * i][1]), pack_bf16(y[2 * i][2], y[2 * i][3]), pack_bf16(y[2 * i + 1][0], y[2 * i + 1][1]),
                                pack_bf16(y[2 * i + 1][2], y[2 * i + 1][3])};
    stmatrix_x4_trans(a_fragment_trans(q, 16 * i, 2 * slice), packed);
  }
}

// M = P A into the panel m: a warp has the 16 rows of a block and every second tile of 8 columns.
FW_DEVICE void read_products(uint32_t p, uint32_t a, char* m) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), block = warp & 3, odd = warp >> 2;
  float x[4][4];
  FW_UNROLL
  for (int n = 0; n < 4; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) x[n][i] = 0;
  }
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    if (k > block) continue;
    uint32_t left[4];
    ldmatrix_x4(left, a_fragment(p, 16 * block, 2 * k));
    FW_UNROLL
    for (int j = 0; j <= k; ++j) {
      uint32_t right[2];
      ldmatrix_x2_trans(right, a + granule_offset(16 * k + (lane & 15), 2 * j + odd));
      mma_bf16(x[j], left, right[0], right[1]);
    }
  }
  FW_UNROLL
  for (int j = 0; j < 4; ++j) store_pairs<false>(m, block, 2 * j + odd, x[j]);
}

// Z = z_v c (.) v of all value columns as panels, 0 past V and past the chunk's rows, by threads `thread`, + threads, ...
FW_DEVICE void write_values(const Problem& x, const ChunkPlace& place, const RowCoefs* coefs, uint16_t* z, int thread, int threads) {
  const Rows values = chunk_rows(x.in.v, place), gates = chunk_rows(x.in.write_gate, place);
  const int blocks = (x.V + kValueBlock - 1) / kValueBlock;
  const bool gate = x.rule.write == Gate::kChannel;
  for (int i = thread; i < blocks * 512; i += threads) {
    const int row = (i >> 3) & 63, granule = (i & 7) + (i >> 9) * 8;
    float v[8], c[8];
    FW_UNROLL
    for (int j = 0; j < 8; ++j) v[j] = 0, c[j] = 1;
    if (row < place.span.rows) {
      load_channels(values, row, granule * 8, x.V, v);
      if (gate) load_channels(gates, row, granule * 8, x.V, c);
    }
    const float z_v = coefs[row].rest.z;
    FW_UNROLL
    for (int j = 0; j < 8; ++j) v[j] *= z_v * c[j];
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(z) + granule_offset(row, granule)) =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}

}  // namespace fw::cuda
