// The maker of P = scale |q_i|^-1 2^(G_i - G_j) (q_i.k_j), j <= i, of every chunk: four warps, 16 rows each.
// Warp w has w + 1 blocks of P. Warp 0, with the fewest, also makes the next chunk's decays, warp 1 stores O, and
// warp 2 loads stages. An instruction of a warp takes 9 cycles, and everybody waits for the warp with most of them.
#pragma once

#include "scan/cuda/sm90/fused/copies.cuh"
#include "scan/cuda/sm90/fused/decays.cuh"

namespace fw::cuda {

// |q|^2 of the warp's 16 rows, 8 lanes a row and four rows at once; the result is that of row query_row(). Sums of four
// squares are bf16, whose errors average out over 32 of them; the others are float32.
FW_DEVICE float query_squares(const char* rows, const FusedLane& own) {
  float sum[4];
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint4 x[4];
    FW_UNROLL
    for (int i = 0; i < 4; ++i)
      x[i] = *reinterpret_cast<const uint4*>(rows + half * kSw128Bytes + (own.matrix + 4 * i) * 128 + own.line * 16);
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t squares = mul_bf16x2(x[i].x, x[i].x);
      squares = fma_bf16x2(x[i].y, x[i].y, squares);
      squares = fma_bf16x2(x[i].z, x[i].z, squares);
      squares = fma_bf16x2(x[i].w, x[i].w, squares);
      const float both = bf16_low(squares) + bf16_high(squares);
      sum[i] = half == 0 ? both : sum[i] + both;
    }
  }
  const bool odd = (own.lane & 1) != 0, second = (own.lane & 2) != 0;
  const float first = (odd ? sum[2] : sum[0]) + shuffle_xor(odd ? sum[0] : sum[2], 1),
              next = (odd ? sum[3] : sum[1]) + shuffle_xor(odd ? sum[1] : sum[3], 1);
  float all = (second ? next : first) + shuffle_xor(second ? first : next, 2);
  all += shuffle_xor(all, 4);
  return all;
}
FW_DEVICE int query_row(const FusedLane& own) {
  return 16 * own.warp + 4 * (2 * (own.lane & 1) + (own.lane >> 1 & 1)) + own.matrix;
}

// The factors of the chunk's rows of Q.
FW_DEVICE void make_query_scalars(const FusedBlock& block, int slot, const FusedLane& own) {
  const Problem& x = block.args.problem;
  ChunkScalars& scalars = block.scalars(slot);
  float factor = x.scale;
  if (x.rule.q_norm == Norm::kL2) {
    const char* const rows = block.shared + slot * FusedShape::kStage + FusedShape::kQ + 16 * own.warp * 128;
    factor *= fused_inverse_norm(query_squares(rows, own), block.args.norm_eps);
  }
  if (own.line < 4) {  // each row once
    const int row = query_row(own);
    scalars.query[row] = factor;
    scalars.read[row] = factor * scalars.gamma[row];
  }
  sync_warp();
}

// P of the warp's rows into its tile; blocks on the right of the diagonal stay 0.
FW_DEVICE void store_p(const ChunkScalars& scalars, const float (&product)[32], uint32_t tile, const FusedLane& own) {
  const int row = 16 * own.warp + own.row;
  const float query[2] = {scalars.query[row], scalars.query[row + 8]};
  const float left[2] = {query[0] * scalars.from_block[row], query[1] * scalars.from_block[row + 8]};
  FW_UNROLL
  for (int column = 0; column < 4; ++column) {
    if (column > own.warp) continue;
    float p[8];
    if (column < own.warp) {
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float2 f = float2_at(scalars.to_block[own.warp - 1] + 16 * column + 8 * half + own.pair);
        const float* s = product + 8 * column + 4 * half;
        p[4 * half] = f.x * s[0] * left[0], p[4 * half + 1] = f.y * s[1] * left[0];
        p[4 * half + 2] = f.x * s[2] * left[1], p[4 * half + 3] = f.y * s[3] * left[1];
      }
    } else {
      const float decay[2] = {scalars.decay[row], scalars.decay[row + 8]};
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = 8 * half + own.pair;
        const float2 g = float2_at(scalars.decay + 16 * column + j);
        const float* s = product + 8 * column + 4 * half;
        p[4 * half] = j > own.row ? 0.0f : exp2_fast(decay[0] - g.x) * query[0] * s[0];
        p[4 * half + 1] = j + 1 > own.row ? 0.0f : exp2_fast(decay[0] - g.y) * query[0] * s[1];
        p[4 * half + 2] = j > own.row + 8 ? 0.0f : exp2_fast(decay[1] - g.x) * query[1] * s[2];
        p[4 * half + 3] = j + 1 > own.row + 8 ? 0.0f : exp2_fast(decay[1] - g.y) * query[1] * s[3];
      }
    }
    stmatrix_x4(tile + own.down(16 * own.warp, 2 * column),
                {pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]), pack_bf16(p[6], p[7])});
  }
}

FW_DEVICE void make_p(const FusedBlock& block) {
  const FusedLane own(static_cast<int>(lane_index()));
  const int chunks = block.chunks;
  FusedBarriers& barriers = block.barriers;
  FusedDecays decays(block, own.lane);
  if (own.warp == 2) {
    FW_NO_UNROLL
    for (int c = 0; c < kFusedStages && c < chunks; ++c) load_fused_stage(block, c, c, own.lane);
  }
  if (own.warp == 0 && chunks > 0) {
    decays.fetch(0);
    decays.make(0);
    if (chunks > 1) decays.fetch(1);
  }
  Ring<kFusedStages> ring;
  FW_NO_UNROLL
  for (int c = 0; c < chunks; ++c) {
    const int buffer = c & 1, slot = ring.slot;
    float product[32];
    barriers.stages.wait_full(ring);
    multiply_shared_rows(product, block.stage(slot) + FusedShape::kQ, block.stage(slot) + FusedShape::kK);
    mbarrier_wait(barriers.scalars + slot, ring.parity);
    make_query_scalars(block, slot, own);
    mbarrier_wait(barriers.pair_empty + buffer, (c >> 1 & 1) ^ 1);
    wgmma_wait<0>();
    keep(product);
    store_p(block.scalars(slot), product, block.pair(buffer) + FusedShape::kP, own);
    fence_async_shared();
    sync_warp();
    if (own.lane == 0) mbarrier_arrive(barriers.p_full + buffer);
    ring.next();
    if (own.warp == 0) {
      if (c + 1 < chunks) decays.make(ring.slot);
      if (c + 2 < chunks) decays.fetch(c + 2);
    } else if (own.warp == 2) {
      // The stage of the chunk before, once the state's warps have done with it.
      const int next = c - 1 + kFusedStages;
      if (c > 0 && next < chunks) {
        const int before = slot == 0 ? kFusedStages - 1 : slot - 1;
        mbarrier_wait(barriers.stages.empty + before, (c - 1) / kFusedStages & 1);
        load_fused_stage(block, next, before, own.lane);
      }
    } else if (own.warp == 1) {
      if (c > 1) store_fused_o(block, c - 2, own.lane);
    }
  }
  if (own.warp == 1) {
    if (chunks > 1) store_fused_o(block, chunks - 2, own.lane);
    if (chunks > 0) store_fused_o(block, chunks - 1, own.lane);
    bulk_wait<0>();
  }
}

}  // namespace fw::cuda
