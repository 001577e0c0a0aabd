// The products of a chunk that contract over tokens or values: R, dR, dZ, dP, dT and what the states give dr, de, dw.
// Their operands lie in shared memory. Four warps, by wgmma or each for itself by mma.sync, make all 64 rows of their
// group's columns.
#pragma once

#include "gpu/sm80/products.cuh"
#include "scan/cuda/gradients/products.cuh"
#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

// kSplitDescriptor: wgmma with join_descriptor(). kMmaSync: products are over when start_product() returns.
enum class ProductForm { kWgmma, kSplitDescriptor, kMmaSync };
template <class Shape>
inline constexpr ProductForm kProductForm = Shape::kMmaSync   ? ProductForm::kMmaSync
                                            : Shape::kChannel ? ProductForm::kSplitDescriptor
                                                              : ProductForm::kWgmma;

#if FW_HOPPER
// wgmma_descriptor() of this swizzle, its two words apart: steps add to the lower one alone, and the compiler makes
// them without carries.
FW_DEVICE uint64_t join_descriptor(uint32_t low) { return static_cast<uint64_t>(0x40000000u | 1024 >> 4) << 32 | low; }

template <int kColumns, bool kLeftTransposed, bool kRightTransposed, bool kFresh, bool kSplitDescriptor>
FW_DEVICE void start_wgmma(float (&d)[kColumns / 2], uint32_t left, uint32_t right) {
  const uint64_t a = wgmma_descriptor(left, kLeftTransposed ? kSw128Bytes : 16, 1024),
                 b = wgmma_descriptor(right, kRightTransposed ? kSw128Bytes : 16, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {  // addresses count units of 16 bytes
    if constexpr (kSplitDescriptor) {
      const uint32_t left_low = static_cast<uint32_t>(a) + (kLeftTransposed ? 128 : 2) * k,
                     right_low = static_cast<uint32_t>(b) + (kRightTransposed ? 128 : 2) * k;
      wgmma_ss<kColumns, kLeftTransposed, kRightTransposed>(d, join_descriptor(left_low), join_descriptor(right_low),
                                                            !kFresh || k > 0);
    } else {
      wgmma_ss<kColumns, kLeftTransposed, kRightTransposed>(d, a + (kLeftTransposed ? 128 : 2) * k,
                                                            b + (kRightTransposed ? 128 : 2) * k, !kFresh || k > 0);
    }
  }
}
#endif

// d += left right (kFresh: d = left right) over 64 summed numbers. left: tile [row][summed], or its transpose; right:
// tile [column][summed], or its transpose.
template <int kColumns, bool kLeftTransposed, bool kRightTransposed, bool kFresh = false,
          ProductForm kForm = ProductForm::kWgmma>
FW_DEVICE void start_product(float (&d)[kColumns / 2], uint32_t left, uint32_t right) {
  if constexpr (kForm == ProductForm::kMmaSync) {
    if constexpr (kFresh) clear_sums(d);
    mma_tiles<kColumns, kLeftTransposed, kRightTransposed>(d, left, right);
  } else {
#if FW_HOPPER
    start_wgmma<kColumns, kLeftTransposed, kRightTransposed, kFresh, kForm == ProductForm::kSplitDescriptor>(d, left,
                                                                                                             right);
#endif
  }
}

template <int kTiles>
FW_DEVICE float (&flat(float (&x)[kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float(&)[4 * kTiles]>(x);
}

// Where the group's columns begin in a tile [summed][columns] of keys, of values, and its rows in a tile of values.
template <class Shape>
FW_DEVICE int key_columns(const GradientChunk<Shape>& c) {
  return (c.group() >> 1) * kSw128Bytes + (c.group() & 1) * 64;
}
template <class Shape>
FW_DEVICE int value_columns(const GradientChunk<Shape>& c) {
  return 2 * pair_column(c);
}
template <class Shape>
FW_DEVICE int value_rows_from(const GradientChunk<Shape>& c) {
  return 128 * pair_column(c);
}

// In a stage W becomes R = A W. V becomes dR = P^T dO + V and then dZ = A^T dR (additive R = W, dZ = dR). This holds
// where V is not dZ already and W not R. Ends with a barrier.
template <class Shape>
FW_DEVICE void make_value_tiles(const WorkTile<Shape>& c, int stage) {
  constexpr int kTiles = PairSums<Shape>::kTiles, kColumns = PairSums<Shape>::kColumns;
  const uint32_t columns = c.base + value_columns(c);
  fence_async_shared();  // what was copied and written for this
  if constexpr (Shape::kDelta) {
    if (c.args.v_is_dz && c.solved()) return sync_threads();
    if (c.args.v_is_dz) {
      float r[kTiles][4];
      wgmma_fence();
      start_product<kColumns, false, true, true, kProductForm<Shape>>(flat(r), c.base + Shape::kA,
                                                                      columns + stage + Shape::kW);
      wgmma_commit();
      wgmma_wait<0>();
      keep(flat(r));
      sync_threads();
      store_tile(c, stage + Shape::kW, r);
      fence_async_shared();
      sync_threads();
      return;
    }
  }
  float d[kTiles][4], r[kTiles][4];
  FW_UNROLL
  for (int j = 0; j < kTiles; ++j) {
    const uint32_t low = pair_fragment(c, stage + Shape::kV, 0, j), high = pair_fragment(c, stage + Shape::kV, 1, j);
    d[j][0] = bf16_low(low), d[j][1] = bf16_high(low), d[j][2] = bf16_low(high), d[j][3] = bf16_high(high);
  }
  keep(flat(d));
  wgmma_fence();
  start_product<kColumns, true, true, false, kProductForm<Shape>>(flat(d), c.base + Shape::kP,
                                                                  columns + stage + Shape::kOut);
  constexpr bool kTogether = Shape::kDelta && kTiles == 2;  // else there are too few registers
  if (kTogether)
    start_product<kColumns, false, true, true, kProductForm<Shape>>(flat(r), c.base + Shape::kA,
                                                                    columns + stage + Shape::kW);
  wgmma_commit();
  wgmma_wait<0>();
  keep(flat(d));
  if constexpr (!Shape::kDelta) {
    store_tile(c, stage + Shape::kV, d);  // where this thread has read
  } else {
    store_tile(c, Shape::kDR, d);
    if (!kTogether) {
      wgmma_fence();
      start_product<kColumns, false, true, true, kProductForm<Shape>>(flat(r), c.base + Shape::kA,
                                                                      columns + stage + Shape::kW);
      wgmma_commit();
      wgmma_wait<0>();
    }
    keep(flat(r));
    fence_async_shared();
    sync_threads();
    store_tile(c, stage + Shape::kW, r);
    float z[kTiles][4];
    wgmma_fence();
    start_product<kColumns, true, true, true, kProductForm<Shape>>(flat(z), c.base + Shape::kA, columns + Shape::kDR);
    wgmma_commit();
    wgmma_wait<0>();
    keep(flat(z));
    store_tile(c, stage + Shape::kV, z);
  }
  fence_async_shared();
  sync_threads();
}

// Adds a stage's values to the products; until finish_value_products() nothing touches them.
template <class Shape>
FW_DEVICE void start_value_products(const WorkTile<Shape>& c, int stage, StreamSums& sums, PairSums<Shape>& pairs) {
  constexpr int kColumns = PairSums<Shape>::kColumns;
  const uint32_t at = c.base + stage, states = at + key_columns(c), r_rows = at + Shape::kW + value_rows_from(c);
  wgmma_fence();
  start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.r), at + Shape::kOut, states + Shape::kState);
  if (Shape::kDelta)
    start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.e), at + Shape::kV, states + Shape::kState);
  start_product<32, false, true, false, kProductForm<Shape>>(flat(sums.w), at + Shape::kW, states + Shape::kDState);
  start_product<kColumns, false, false, false, kProductForm<Shape>>(flat(pairs.p), at + Shape::kOut, r_rows);
  if (Shape::kDelta)
    start_product<kColumns, false, false, false, kProductForm<Shape>>(flat(pairs.t), at + Shape::kV, r_rows);
  wgmma_commit();
}
template <class Shape>
FW_DEVICE void finish_value_products(StreamSums& sums, PairSums<Shape>& pairs) {
  wgmma_wait<0>();
  keep(flat(sums.r)), keep(flat(sums.w)), keep(flat(pairs.p));
  if (Shape::kDelta) keep(flat(sums.e)), keep(flat(pairs.t));
}

}  // namespace fw::cuda
