// The walk of the transposed state S^T [64 values, 128] of a warpgroup over the chunks, in registers. With rows of q, k
// and v, A and P of the makers and the scalars of the chunk:
//   W = k S      R = v + diag(erase) W      U = A R      O = diag(read) q S + P U      S = gamma S + k^T diag(keys) U
// Products have bf16 operands and float32 sums; S stays float32.
#pragma once

#include "scan/cuda/sm90/fused/shape.cuh"

namespace fw::cuda {

// Of a warpgroup's values. Read from shared memory where it is wanted: there is no register for it in the loop.
FW_DEVICE ScanCoord state_coord(const FusedBlock& block, int half) {
  ScanCoord coord{};
  coord.n = block.rows.n, coord.hv = block.rows.o_head, coord.value_block = half;
  return coord;
}

FW_DEVICE void walk_state(const FusedBlock& block, int half) {
  using Shape = FusedShape;
  const FusedForwardArgs& args = block.args;
  const FusedLane own(static_cast<int>(lane_index()));
  const int chunks = block.chunks;
  FusedBarriers& barriers = block.barriers;
  float state[kFusedK / 2];
  load_state(args.initial_state, state_coord(block, half), block.rows.n, kFusedK, kFusedK, state);
  uint32_t a[8][4], packed_o[4][4];
  pack_fragments(state, a);
  // Of O's tile [64 tokens, 64 values], the fragment of 16 tokens and the warp's values; 16 tokens further are 2048
  // bytes. The same of v's, in the first stage, is kV - kO away.
  const uint32_t o_tile = block.base + Shape::kO + half * kSw128Bytes + own.right(0, 2 * own.warp);
  const auto store_o = [&](int c) {
    mbarrier_wait(barriers.o_empty + half, (c & 1) ^ 1);
    FW_UNROLL
    for (int k = 0; k < 4; ++k) stmatrix_x4_trans(o_tile + k * 2048, packed_o[k]);
    fence_async_shared();
    sync_warp();
    if (own.lane == 0) mbarrier_arrive(barriers.o_full + half);
  };
  Ring<kFusedStages> ring;
  if (chunks > 0) {
    barriers.stages.wait_full(ring);
    mbarrier_wait(barriers.scalars, 0);
    const float gamma = block.scalars(0).gamma_end[0];
    FW_UNROLL
    for (float& x : state) x *= gamma;
  }
  FW_NO_UNROLL
  for (int c = 0; c < chunks; ++c) {
    // Here the stage is full, a = S, state = gamma S, and packed_o is O of the chunk before.
    const int buffer = c & 1;
    const uint32_t stage = block.stage(ring.slot), pair = block.pair(buffer);
    const ChunkScalars& scalars = block.scalars(ring.slot);
    // O takes the registers of W, which is not alive with it.
    float first[32], u[32];
    float(&w)[32] = first, (&o)[32] = first;
    uint32_t b[4][4];
    wgmma_fence();
    multiply_rows(w, a, stage + Shape::kK, false);
    wgmma_commit();
    if (c > 0) store_o(c - 1);
    mbarrier_wait(barriers.a_full + buffer, c >> 1 & 1);
    wgmma_wait<0>();
    keep(w);
    FW_UNROLL
    for (int k = 0; k < 4; ++k) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, o_tile + ring.slot * Shape::kStage + (Shape::kV - Shape::kO + k * 2048));
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float2 f = float2_at(scalars.erase + 16 * k + 8 * i + own.pair);
        const float* s = w + 8 * k + 4 * i;
        b[k][2 * i] = pack_bf16(bf16_low(v[2 * i]) + f.x * s[0], bf16_high(v[2 * i]) + f.y * s[1]);
        b[k][2 * i + 1] = pack_bf16(bf16_low(v[2 * i + 1]) + f.x * s[2], bf16_high(v[2 * i + 1]) + f.y * s[3]);
      }
    }
    wgmma_fence();
    multiply_rows(o, a, stage + Shape::kQ, false);
    wgmma_commit();
    wgmma_wait<0>();
    keep(o);
    wgmma_fence();
    multiply_rows(u, b, pair + Shape::kA, false);
    wgmma_commit();
    mbarrier_wait(barriers.p_full + buffer, c >> 1 & 1);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float2 f = float2_at(scalars.read + 8 * j + own.pair);
      o[4 * j] *= f.x, o[4 * j + 1] *= f.y, o[4 * j + 2] *= f.x, o[4 * j + 3] *= f.y;
    }
    wgmma_wait<0>();
    keep(u);
    uint32_t scaled[4][4];
    FW_UNROLL
    for (int k = 0; k < 4; ++k) {
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float* s = u + 8 * k + 4 * i;
        const float2 f = float2_at(scalars.keys + 16 * k + 8 * i + own.pair);
        scaled[k][2 * i] = pack_bf16(s[0] * f.x, s[1] * f.y), scaled[k][2 * i + 1] = pack_bf16(s[2] * f.x, s[3] * f.y);
        b[k][2 * i] = pack_bf16(s[0], s[1]), b[k][2 * i + 1] = pack_bf16(s[2], s[3]);
      }
    }
    wgmma_fence();
    add_outer<kFusedK>(state, scaled, stage + Shape::kK);
    wgmma_commit();
    multiply_rows(o, b, pair + Shape::kP, true);
    wgmma_commit();
    const int done = ring.slot;
    ring.next();
    if (c + 1 < chunks) {
      barriers.stages.wait_full(ring);
      mbarrier_wait(barriers.scalars + ring.slot, ring.parity);
    }
    wgmma_wait<1>();
    keep(state);
    pack_fragments(state, a);
    if (c + 1 < chunks) {
      const float gamma = block.scalars(ring.slot).gamma_end[0];
      FW_UNROLL
      for (float& x : state) x *= gamma;
    }
    wgmma_wait<0>();
    keep(o);
    pack_fragments(o, packed_o);
    sync_warp();
    if (own.lane == 0) {
      mbarrier_arrive(barriers.stages.empty + done);
      mbarrier_arrive(barriers.pair_empty + buffer);
    }
  }
  if (chunks > 0) store_o(chunks - 1);
  store_state(args.final_state, state_coord(block, half), block.rows.n, kFusedK, kFusedK, state);
}

}  // namespace fw::cuda
