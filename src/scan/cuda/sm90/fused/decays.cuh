// Decays and step gates of a chunk, by one warp with two neighbouring tokens a lane.
#pragma once

#include "scan/cuda/sm90/fused/shape.cuh"

namespace fw::cuda {

// A decay counts as at least 2^-40 between tokens of a chunk, so that differences of sums keep their digits. The state
// passes nothing through such a decay.
inline constexpr float kFusedLowestStep = -40.0f;

class FusedDecays {
 public:
  FW_DEVICE FusedDecays(const FusedBlock& block, int lane) : block_(block), lane_(lane) {}
  // Starts the loads of the tokens of chunk c.
  FW_DEVICE void fetch(int c) {
    const TokenArgs& in = block_.args.problem.in;
    const int first = c * kChunk + 2 * lane_;
    fetch_pair(in.g, block_.rows.g, first, 0, g_bits_);
    fetch_pair(in.beta, block_.rows.step, first, float_bits(1.0f) >> (in.beta.bf16 != 0 ? 16 : 0), step_bits_);
  }
  // Makes what fetch() has loaded, for a stage.
  FW_DEVICE void make(int slot) const {
    const Problem& x = block_.args.problem;
    ChunkScalars& to = block_.scalars(slot);
    const int at = 2 * lane_;
    float g[2], step[2];
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      g[i] = bits_float(g_bits_[i] << (x.in.g.bf16 != 0 ? 16 : 0)) * kLog2E;
      step[i] = bits_float(step_bits_[i] << (x.in.beta.bf16 != 0 ? 16 : 0));
    }
    const float first = max(g[0], kFusedLowestStep);
    float second = first + max(g[1], kFusedLowestStep);
    FW_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = shuffle_up(second, distance);
      if (lane_ >= distance) second += before;
    }
    const float before = shuffle_up(second, 1);
    const float sum[2] = {(lane_ == 0 ? 0.0f : before) + first, second};
    const float end = shuffle(second, 31);
    put_float2(to.decay + at, sum[0], sum[1]);
    put_float2(to.step + at, step[0], step[1]);
    float block_end = 0;
    FW_UNROLL
    for (int block = 1; block < 4; ++block) {
      const float last = shuffle(second, 8 * block - 1);
      if (lane_ / 8 == block) block_end = last;
      if (lane_ < 8 * block)
        put_float2(to.to_block[block - 1] + at, exp2_fast(last - sum[0]), exp2_fast(last - sum[1]));
    }
    put_float2(to.from_block + at, exp2_fast(sum[0] - block_end), exp2_fast(sum[1] - block_end));
    float gamma[2] = {exp2_fast(sum[0]), exp2_fast(sum[1])},
          keys[2] = {exp2_fast(end - sum[0]), exp2_fast(end - sum[1])};
    float gamma_end = exp2_fast(end);
    if (warp_ballot(min(g[0], g[1]) < kFusedLowestStep) != 0) [[unlikely]] {
      const uint32_t cuts[2] = {warp_ballot(g[0] < kFusedLowestStep), warp_ballot(g[1] < kFusedLowestStep)};
      const uint32_t below = (uint32_t{1} << lane_) - 1, own = uint32_t{1} << lane_, above = ~(below | own);
      if (((cuts[0] & (below | own)) | (cuts[1] & below)) != 0) gamma[0] = 0;
      if (((cuts[0] | cuts[1]) & (below | own)) != 0) gamma[1] = 0;
      if (((cuts[0] & above) | (cuts[1] & (own | above))) != 0) keys[0] = 0;
      if (((cuts[0] | cuts[1]) & above) != 0) keys[1] = 0;
      gamma_end = 0;
    }
    put_float2(to.gamma + at, gamma[0], gamma[1]);
    put_float2(to.keys + at, keys[0], keys[1]);
    if (lane_ == 0) to.gamma_end[0] = gamma_end;
    sync_warp();
    if (lane_ == 0) mbarrier_arrive(block_.barriers.scalars + slot);
  }

 private:
  // Of tokens `first` and the next; past the end 0, and where there is no tensor `absent`.
  FW_DEVICE void fetch_pair(const TokenArg& a, const char* data, int first, uint32_t absent,
                            uint32_t (&bits)[2]) const {
    const bool valid[2] = {first < block_.length, first + 1 < block_.length};
    bits[0] = valid[0] ? absent : 0, bits[1] = valid[1] ? absent : 0;
    if (data == nullptr) return;
    if (a.bf16 != 0) {
      const auto* at = reinterpret_cast<const uint16_t*>(data) + first * a.stride_t;
      bits[0] = valid[0] ? at[0] : 0, bits[1] = valid[1] ? at[a.stride_t] : 0;
    } else {
      const auto* at = reinterpret_cast<const uint32_t*>(data) + first * a.stride_t;
      bits[0] = valid[0] ? at[0] : 0, bits[1] = valid[1] ? at[a.stride_t] : 0;
    }
  }

  const FusedBlock& block_;
  int lane_;
  uint32_t g_bits_[2], step_bits_[2];
};

}  // namespace fw::cuda
