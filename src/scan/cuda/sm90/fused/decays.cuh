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
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = c * kChunk + 2 * lane_ + i;
      g_bits_[i] = number(in.g, block_.rows.g, token);
      step_bits_[i] = number(in.beta, block_.rows.step, token);
    }
    left_ = block_.length - c * kChunk - 2 * lane_;
  }
  // Makes what fetch() has loaded, for a stage.
  FW_DEVICE void make(int slot) const {
    const Problem& x = block_.args.problem;
    ChunkNumbers& to = block_.numbers(slot);
    const int at = 2 * lane_;
    float g[2], step[2];
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      g[i] = value_of_bits(x.in.g.bf16 != 0, g_bits_[i]) * kLog2E;
      step[i] = x.rule.gain == Gain::kOne ? (i < left_ ? 1.0f : 0.0f) : value_of_bits(x.in.beta.bf16 != 0, step_bits_[i]);
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
      if (lane_ < 8 * block) put_float2(to.to_block[block - 1] + at, exp2_fast(last - sum[0]), exp2_fast(last - sum[1]));
    }
    put_float2(to.from_block + at, exp2_fast(sum[0] - block_end), exp2_fast(sum[1] - block_end));
    float gamma[2] = {exp2_fast(sum[0]), exp2_fast(sum[1])}, keys[2] = {exp2_fast(end - sum[0]), exp2_fast(end - sum[1])};
    float gamma_end = exp2_fast(end);
    const uint32_t cuts[2] = {warp_ballot(g[0] < kFusedLowestStep), warp_ballot(g[1] < kFusedLowestStep)};
    if ((cuts[0] | cuts[1]) != 0) {
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
    if (lane_ == 0) mbarrier_arrive(block_.barriers.numbers + slot);
  }

 private:
  FW_DEVICE uint32_t number(const TokenArg& a, const char* data, int token) const {
    if (data == nullptr || token >= block_.length) return 0;
    const int64_t at = token * a.stride_t;
    return load_bits(a.bf16 != 0, data + (a.bf16 != 0 ? 2 : 4) * at);
  }

  const FusedBlock& block_;
  int lane_;
  uint32_t g_bits_[2], step_bits_[2];
  int left_ = 0;  // tokens of the sequence from the lane's first one on
};

}  // namespace fw::cuda
