// The maker of A of every chunk: four warps, 16 rows each. With |k_i|^-1 = n_i (1 where keys are not normalised) and
// the step s_i,
//   T_ij = s_i n_i^2 2^(G_i - G_j) (k_i.k_j), j < i      A = (I + T)^-1 diag(s n)
// A R is diag(n) U then, which is what rows of the raw k want (forward.cu). No norm is a factor of columns of T, and
// |k_i|^2 is the diagonal of K K^T, which the warp of row i has.
#pragma once

#include "scan/cuda/sm90/fused/inverse.cuh"

namespace fw::cuda {

// The step s of a token: what multiplies the normalised key's erase and write (gain_pair() of rule/front.h, s_rho over
// rho). squares: |k|^2 of the normalised key.
FW_DEVICE float fused_step(const FusedForwardArgs& args, float gate, float squares) {
  switch (args.problem.rule.gain) {
    case Gain::kLonghorn:
      return gate * rcp_fast(1.0f + gate * squares);
    case Gain::kNlms:
    case Gain::kKaczmarz: {
      const float sum = squares + args.gain_eps;
      return sum > 0.0f ? gate * rcp_fast(sum) : 0.0f;
    }
    default:
      return gate;
  }
}

// Of rows lane / 4 and 8 below of the warp.
struct KeyFactors {
  float norm[2], step[2];  // n, s
};
template <FusedStep kStep>
FW_DEVICE KeyFactors key_factors(const FusedBlock& block, const ChunkScalars& scalars, const float (&product)[32],
                                 const FusedLane& own) {
  const Problem& x = block.args.problem;
  float diagonal[2] = {0, 0};
  FW_UNROLL
  for (int w = 0; w < 4; ++w) {
    if (w != own.warp) continue;
    diagonal[0] = (own.row & 1) != 0 ? product[8 * w + 1] : product[8 * w];
    diagonal[1] = (own.row & 1) != 0 ? product[8 * w + 7] : product[8 * w + 6];
  }
  const int from = (own.lane & 28) | (own.row >> 1), row = 16 * own.warp + own.row;
  KeyFactors key;
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float squares = shuffle(diagonal[i], from);
    key.norm[i] = x.rule.k_norm == Norm::kL2 ? fused_inverse_norm(squares, block.args.norm_eps) : 1.0f;
    const float gate = scalars.step[row + 8 * i];
    key.step[i] = kStep == FusedStep::kOfKey ? fused_step(block.args, gate, squares * key.norm[i] * key.norm[i]) : gate;
  }
  return key;
}

// T of the warp's rows: blocks on the left of the diagonal, without the factors of rows, into its tile, the diagonal
// block to `diagonal`. What is above the diagonal there may be no number, and is not read.
FW_DEVICE void store_t(const ChunkScalars& scalars, const float (&product)[32], const KeyFactors& key, uint32_t tile,
                       char* diagonal, const FusedLane& own) {
  const int row = 16 * own.warp + own.row;
  FW_UNROLL
  for (int column = 0; column < 4; ++column) {
    if (column > own.warp) continue;
    const float* s = product + 8 * column;
    if (column < own.warp) {
      const float* factors = scalars.to_block[own.warp - 1] + 16 * column + own.pair;
      const float2 f = float2_at(factors), h = float2_at(factors + 8);
      stmatrix_x4(tile + own.down(16 * own.warp, 2 * column),
                  {pack_bf16(f.x * s[0], f.y * s[1]), pack_bf16(f.x * s[2], f.y * s[3]),
                   pack_bf16(h.x * s[4], h.y * s[5]), pack_bf16(h.x * s[6], h.y * s[7])});
    } else {
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float decay = scalars.decay[row + 8 * i], factor = key.step[i] * key.norm[i] * key.norm[i];
        float* const to = reinterpret_cast<float*>(diagonal + (own.row + 8 * i) * FusedShape::kDiagonalRow);
        FW_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int j = 8 * half + own.pair;
          const float2 g = float2_at(scalars.decay + 16 * column + j);
          put_float2(to + j, exp2_fast(decay - g.x) * factor * s[4 * half + 2 * i],
                     exp2_fast(decay - g.y) * factor * s[4 * half + 2 * i + 1]);
        }
      }
    }
  }
}

template <FusedStep kStep>
FW_DEVICE void make_a(const FusedBlock& block) {
  // A number of which the compiler does not know that it comes of the thread index: it would read that anew in every
  // round, for 50 cycles each time.
  const int lane = static_cast<int>(lane_index());
  const FusedLane own(shuffle(lane, lane));
  const int chunks = block.chunks;
  if (chunks == 0) return;
  FusedBarriers& barriers = block.barriers;
  constexpr int kGroupBarrier = 1;
  char* const diagonal = block.shared + FusedShape::kDiagonals + own.warp * FusedShape::kDiagonal;
  const int row = 16 * own.warp + own.row, column = 16 * own.warp + (own.lane & 15);
  float product[32];
  const auto multiply_keys = [&](int slot) {
    const uint32_t keys = block.stage(slot) + FusedShape::kK;
    multiply_shared_rows(product, keys, keys);
  };
  Ring<kFusedStages> ring;
  barriers.stages.wait_full(ring);
  multiply_keys(0);
  wgmma_wait<0>();
  keep(product);
  FW_NO_UNROLL
  for (int c = 0; c < chunks; ++c) {
    // K K^T of the chunk is in registers.
    const int buffer = c & 1;
    ChunkScalars& scalars = block.scalars(ring.slot);
    const uint32_t a_tile = block.pair(buffer) + FusedShape::kA;
    const int t_offset = FusedShape::kT + buffer * kSw128Bytes;
    const uint32_t t_tile = block.base + static_cast<uint32_t>(t_offset);
    mbarrier_wait(barriers.scalars + ring.slot, ring.parity);
    mbarrier_wait(barriers.pair_empty + buffer, (c >> 1 & 1) ^ 1);
    const KeyFactors key = key_factors<kStep>(block, scalars, product, own);
    if ((own.lane & 3) == 0) {
      scalars.erase[row] = -key.norm[0] * scalars.gamma[row];
      scalars.erase[row + 8] = -key.norm[1] * scalars.gamma[row + 8];
    }
    store_t(scalars, product, key, t_tile, diagonal, own);
    sync_warp();
    uint32_t a[4];
    {
      float inverse[16];
      invert_diagonal(diagonal, own.lane & 15, inverse);
      // of row lane % 16
      const int from = 4 * own.line;
      const float norm_low = shuffle(key.norm[0], from), norm_high = shuffle(key.norm[1], from),
                  step_low = shuffle(key.step[0], from), step_high = shuffle(key.step[1], from);
      const bool low = (own.lane & 8) == 0;
      const float norm = low ? norm_low : norm_high, of_a = (low ? step_low : step_high) * norm;
      const float factor = own.lane < 16 ? of_a * norm * scalars.from_block[column] : of_a;
      store_diagonal(inverse, factor, block.shared + t_offset, diagonal, a_tile, own, a);
    }
    ring.next();
    // K K^T of the next chunk meanwhile; behind the last one that of some stage, which nobody reads.
    if (c + 1 < chunks) barriers.stages.wait_full(ring);
    multiply_keys(ring.slot);
    named_barrier_sync(kGroupBarrier, kGroupThreads);
    block_column(t_tile, a_tile, own, a);
    fence_async_shared();
    sync_warp();
    if (own.lane == 0) mbarrier_arrive(barriers.a_full + buffer);
    wgmma_wait<0>();
    keep(product);
  }
}

}  // namespace fw::cuda
