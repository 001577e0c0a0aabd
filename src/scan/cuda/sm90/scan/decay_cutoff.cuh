// Where the decays at the end of a segment (in reverse: at its start) let nothing through, the first pass over a cut
// sequence (device_plan.h) need not see its other tokens. Take a rule whose step is a symmetric contraction
// (rule/step_bound.h). What a segment does to a state, M, is then at most the product of its tokens' largest decays.
// That is exp of the sum of the largest g of every token. Below kDecayCutoff, 2^-40, M counts as 0, and what a segment
// leaves of a zero state is what its last chunks do from the one on after which that holds. So the error of a state is
// at most 2^-40 of the state at the segment's start; a state has 24 bits.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/sm90/scan/parts.cuh"

namespace fw::cuda {

inline constexpr float kDecayCutoff = -27.7258872f;  // log 2^-40
inline constexpr int kMostFading = 16;               // chunks that are looked at: beyond, too little is spared

// No number is the largest.
FW_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

// The laws of a lane's four channels.
struct CutoffActivations {
  GateScalars<4> own;
  FW_DEVICE CutoffActivations(const DecayCutoffArg& uses_decay_cutoff, int head) {
    const int channel = 4 * static_cast<int>(lane_index());
    if (uses_decay_cutoff.fused.g.given != GateActivation::kValue && channel < uses_decay_cutoff.channels)
      own = gate_scalars<4>(uses_decay_cutoff.fused.a_log, uses_decay_cutoff.fused.dt_bias, head, channel);
  }
  // Logits to values, rounded as prepare() rounds them.
  FW_DEVICE void form(const DecayCutoffArg& uses_decay_cutoff, float (&x)[4]) const {
    with_decay_law(uses_decay_cutoff.fused.g, [&](auto sigmoid) {
      FW_UNROLL
      for (int j = 0; j < 4; j += 2) {
        const DecayLaw low(uses_decay_cutoff.fused.g, own.bias[j], own.rate[j]),
            high(uses_decay_cutoff.fused.g, own.bias[j + 1], own.rate[j + 1]);
        const uint32_t pair = fused_decays<sigmoid.value>(low, high, pack_bf16(x[j], x[j + 1]));
        x[j] = bf16_low(pair), x[j + 1] = bf16_high(pair);
      }
    });
  }
};

// The sum over the warp's 8 rows of chunk c of their largest log-decay.
FW_DEVICE float largest_decays(const DecayCutoffArg& uses_decay_cutoff, const CutoffActivations& laws, const Rows& g,
                               int c, int length) {
  const int K = uses_decay_cutoff.channels;
  float sum = 0;
  const int lane = static_cast<int>(lane_index()), first = c * kChunk + 8 * static_cast<int>(warp_index());
  if (K == 1) {
    if (lane < 8 && first + lane < length) sum = load_element(g, first + lane, 0);
    return warp_sum(sum);
  }
  float most[8];
  FW_UNROLL
  for (int r = 0; r < 8; ++r) {
    float x[4];
    const bool there = first + r < length && 4 * lane < K;
    if (there) load_channels(g, first + r, 4 * lane, K, x);
    if (there && uses_decay_cutoff.fused.g.given != GateActivation::kValue) laws.form(uses_decay_cutoff, x);
    most[r] = there ? x[0] : bits_float(0xff800000u);
    FW_UNROLL
    for (int j = 1; j < 4; ++j) {
      if (there && 4 * lane + j < K) most[r] = larger(most[r], x[j]);
    }
  }
  FW_UNROLL
  for (int r = 0; r < 8; ++r) {
    FW_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) most[r] = larger(most[r], shuffle_xor(most[r], distance));
    if (first + r < length) sum += most[r];
  }
  return sum;
}

// By all 256 threads: of how many chunks at the segment's end (in reverse: start) nothing survives, fewer than it has;
// 0: not so few, or more than kMostFading. The same for all blocks of the segment and head. shared: of 16 numbers.
template <Direction kDirection>
FW_DEVICE int count_fading(const DecayCutoffArg& uses_decay_cutoff, const SequenceArg& sequences,
                           const ScanCoord& coord, float* shared) {
  const Rows g = rows_of(uses_decay_cutoff.g, sequences, coord.n, coord.hv);
  const CutoffActivations laws(uses_decay_cutoff, coord.hv);
  float total = 0;
  for (int n = 1; n < coord.chunks && n <= kMostFading; ++n) {
    const float own = largest_decays(uses_decay_cutoff, laws, g,
                                     kDirection == Direction::kReverse ? n - 1 : coord.chunks - n, coord.length);
    float* const sums = shared + n % 2 * 8;
    if (lane_index() == 0) sums[warp_index()] = own;
    sync_threads();
    FW_UNROLL
    for (int warp = 0; warp < 8; ++warp) total += sums[warp];
    if (total <= kDecayCutoff) return n;
    // So slow that it would not be in time. Most segments whose states last are told from one chunk.
    if (!(total <= kDecayCutoff * static_cast<float>(n) / static_cast<float>(2 * kMostFading))) return 0;
  }
  return 0;
}
template <Direction kDirection>
FW_DEVICE int fading_chunks(const DecayCutoffArg& uses_decay_cutoff, const SequenceArg& sequences,
                            const ScanCoord& coord, char* shared) {
  if (uses_decay_cutoff.channels == 0) return 0;
  const int chunks = count_fading<kDirection>(uses_decay_cutoff, sequences, coord, reinterpret_cast<float*>(shared));
  fence_async_shared();  // TMA writes there next
  sync_threads();
  return chunks;
}

}  // namespace fw::cuda
