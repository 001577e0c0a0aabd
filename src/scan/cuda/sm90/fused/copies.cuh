// Loads and stores of a chunk's rows: with TMA, but for the last rows of a sequence behind which another one follows.
#pragma once

#include "scan/cuda/sm90/fused/shape.cuh"

namespace fw::cuda {

// By a warp: `left` rows as SW128 tiles, with zeros behind them.
FW_DEVICE void copy_fused_rows(const char* rows, int64_t stride, int left, int lane, uint32_t to) {
  FW_NO_UNROLL
  for (int i = lane; i < kChunk * kFusedK / 8; i += 32) {
    const int row = i >> 4, atom = i & 15;
    const bool valid = row < left;
    const char* from = rows + (valid ? (row * stride + 8 * atom) * 2 : 0);
    cp_async_16(to + sw128_offset(row, 8 * atom), from, valid);
  }
}

// By warp 2: fills a stage, which is empty, with chunk c.
FW_DEVICE void load_fused_stage(const FusedBlock& block, int c, int slot, int lane) {
  using Shape = FusedShape;
  const FusedRows& rows = block.rows;
  uint64_t* const full = block.barriers.stages.full + slot;
  if (block.takes(c)) {
    if (lane == 0) {
      char* const stage = block.shared + slot * Shape::kStage;
      const int token = rows.token + c * kChunk;
      mbarrier_expect(full, Shape::kStage);
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int to = half * kSw128Bytes;
        tensor_load(stage + Shape::kK + to, block.maps.k, 64 * half, rows.k_head, token, rows.batch, full);
        tensor_load(stage + Shape::kQ + to, block.maps.q, 64 * half, rows.q_head, token, rows.batch, full);
        tensor_load(stage + Shape::kV + to, block.maps.v, 64 * half, rows.v_head, token, rows.batch, full);
      }
    }
    sync_warp();
    return;
  }
  const uint32_t stage = block.stage(slot);
  const TokenArgs& in = block.args.problem.in;
  const int first = c * kChunk, left = block.length - first;
  copy_fused_rows(rows.k + 2 * first * in.k.stride_t, in.k.stride_t, left, lane, stage + Shape::kK);
  copy_fused_rows(rows.q + 2 * first * in.q.stride_t, in.q.stride_t, left, lane, stage + Shape::kQ);
  copy_fused_rows(rows.v + 2 * first * in.v.stride_t, in.v.stride_t, left, lane, stage + Shape::kV);
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_shared();
  sync_warp();
  if (lane == 0) mbarrier_arrive(full);
}

// By warp 1: stores O of chunk c.
FW_DEVICE void store_fused_o(const FusedBlock& block, int c, int lane) {
  char* const from = block.shared + FusedShape::kO;
  FusedBarriers& barriers = block.barriers;
  if (block.takes(c)) {
    if (lane == 0) {
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(barriers.o_full + half, c & 1);
        tensor_store(from + half * kSw128Bytes, block.maps.o, 64 * half, block.rows.o_head,
                     block.rows.token + c * kChunk, block.rows.batch);
        bulk_commit();
      }
      bulk_wait_read<1>();
      mbarrier_arrive(barriers.o_empty);
      bulk_wait_read<0>();
      mbarrier_arrive(barriers.o_empty + 1);
    }
    sync_warp();
    return;
  }
  const int64_t stride = block.args.o.stride_t;
  const int first = c * kChunk, left = block.length - first;
  char* const rows = block.rows.o + 2 * first * stride;
  mbarrier_wait(barriers.o_full, c & 1);
  mbarrier_wait(barriers.o_full + 1, c & 1);
  FW_NO_UNROLL
  for (int i = lane; i < left * (kFusedK / 8); i += 32) {
    const int row = i >> 4, atom = i & 15;
    *reinterpret_cast<uint4*>(rows + (row * stride + 8 * atom) * 2) =
        *reinterpret_cast<const uint4*>(from + sw128_offset(row, 8 * atom));
  }
  sync_warp();
  if (lane == 0) {
    mbarrier_arrive(barriers.o_empty);
    mbarrier_arrive(barriers.o_empty + 1);
  }
}

}  // namespace fw::cuda
