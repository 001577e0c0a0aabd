// A of the preconditioner (recurrence.md section 3) through one chunk of one key head, by eight warps: a warp has eight
// neighbouring tokens, a lane kN neighbouring channels of them. First what each warp's tokens add to A (put_run, then a
// barrier of the block), then A before each warp's tokens (run_start), then token for token (step, and PrecondElements
// for M). A row past the end has alpha 1, gain 0 and a zero key: it changes nothing. Other kernels that need M of a
// chunk can have it from here, from A before the chunk, the keys and two gates a token, and need not read it from
// memory.
#pragma once

#include "rule/front.h"
#include "scan/cuda/args.h"
#include "scan/cuda/common/precond_math.cuh"

namespace fw::cuda {

inline constexpr int kRunTokens = 8, kRuns = kChunk / kRunTokens;

// In shared memory; RunPointers: in two buffers.
template <int kN>
struct RunShared {
  float sum[kRuns][32 * kN];  // what a run makes of A = 0
  float product[kRuns];       // of its alphas
};
template <int kN>
struct RunPointers {
  float (*sum)[32 * kN];
  float* product;
};

// The gates of the warp's token lane / 4.
struct RunGates {
  float alpha;   // exp(g)
  float gain;    // beta kn^2, kn the factor that normalises k
  float kn2;     // kn^2
  float square;  // |k|^2
};
FW_DEVICE float of_token(float x, int r) { return shuffle(x, 4 * r); }

// Sums over the warp of eight numbers a lane: number lane / 4 of them.
FW_DEVICE float sum_run(const float (&x)[kRunTokens], int lane) {
  float half[4], quarter[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool high = (lane & 16) != 0;
    half[i] = (high ? x[i + 4] : x[i]) + shuffle_xor(high ? x[i] : x[i + 4], 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = (lane & 8) != 0;
    quarter[i] = (high ? half[i + 2] : half[i]) + shuffle_xor(high ? half[i] : half[i + 2], 8);
  }
  const bool high = (lane & 4) != 0;
  float sum = (high ? quarter[1] : quarter[0]) + shuffle_xor(high ? quarter[0] : quarter[1], 4);
  sum += shuffle_xor(sum, 2);
  sum += shuffle_xor(sum, 1);
  return sum;
}

// g and beta: of the token lane / 4, 0 past the end; square: of its key.
FW_DEVICE RunGates run_gates(const Rule& rule, float g, float beta, float square) {
  const float kn = k_factor(rule, square);
  return {expf(g), beta * kn * kn, kn * kn, square};
}

// Where there is no token or channel A may be 0 and its logarithm infinite.
inline constexpr float kLeastState = 1e-18f;
// Host: M for kernels that do not ask. Squashing forms; without the center.
inline PrecondMap<float> squash_of_any(const Rule& rule) {
  PrecondMap<float> map = precond_map_of(rule);
  if (map.eps < kLeastState) map.eps = kLeastState;
  return map;
}

// One token of A, one channel.
FW_DEVICE float step_precond(float alpha, float gain, float k, float a) { return fmaf(alpha, a, gain * (k * k)); }
// The same, plus eps.
FW_DEVICE float step_precond(float alpha, float gain, float k, float a, float eps) {
  return fmaf(alpha, a, fmaf(gain, k * k, eps));
}

// shared: RunShared or RunPointers. key(r, x): this lane's channels of the warp's token r.
template <int kN, class Shared, class Key>
FW_DEVICE void put_run(const RunGates& gates, int warp, int lane, Shared& shared, Key&& key) {
  float product = 1, sum[kN] = {};
#pragma unroll
  for (int r = 0; r < kRunTokens; ++r) {
    const float alpha = of_token(gates.alpha, r), gain = of_token(gates.gain, r);
    float k[kN];
    key(r, k);
    product *= alpha;
#pragma unroll
    for (int j = 0; j < kN; ++j) sum[j] = step_precond(alpha, gain, k[j], sum[j]);
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) shared.sum[warp][lane * kN + j] = sum[j];
  if (lane == 0) shared.product[warp] = product;
}

// From A before the chunk (going back: its gradient after it) to A before (after) the warp's tokens. The product of
// what lies between is returned.
template <Direction kDirection, int kN, class Shared>
FW_DEVICE float run_start(int warp, int lane, const Shared& shared, float (&a)[kN]) {
  constexpr bool kReverse = kDirection == Direction::kReverse;
  float product = 1;
  FW_NO_UNROLL
  for (int i = kReverse ? kRuns - 1 : 0; kReverse ? i > warp : i < warp; i += kReverse ? -1 : 1) {
    product *= shared.product[i];
#pragma unroll
    for (int j = 0; j < kN; ++j) a[j] = fmaf(shared.product[i], a[j], shared.sum[i][lane * kN + j]);
  }
  return product;
}

}  // namespace fw::cuda
