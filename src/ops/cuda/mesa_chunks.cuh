// What the kernels of a Mesa layer's solve share: its arguments, sums of log decays, and the two kernels that solve
// bf16 sequences in chunks of 64 tokens (mesa_states.cu, mesa_chunks.cu).
//
// Scratch has a slot of every chunk and head: H [K, K] before the chunk, as it is the right operand of mma_bf16. 16
// rows of the summed index and 8 columns are 32 lanes of 16 bytes: {high, high, low, low}, where high is H in bf16 and
// low is H - high. [slots, heads, K / 16, K / 8, 32 lanes] of uint4.
#pragma once

#include <bit>

#include "ops/cuda/scratch.h"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {

inline constexpr int kMesaTokens = static_cast<int>(kMesaChunk);

template <class T>
struct MesaArgs {
  MesaShape shape;
  Mat<const T> rhs, k, beta;
  Mat<const float> g;
  const float* lambda;
  PassSequences sequences;
  const float* state;
  Mat<T> x;
};

// The double whose two words move(word) are.
struct DoubleWords {
  uint32_t low, high;
};
template <class Move>
FW_DEVICE double move_double(double x, const Move& move) {
  const DoubleWords words = std::bit_cast<DoubleWords>(x);
  return std::bit_cast<double>(DoubleWords{move(words.low), move(words.high)});
}

// A log decay from which sums and their differences remain numbers: exp() is 0 in float32 long before.
FW_DEVICE double bounded_log_decay(float g) {
  constexpr float kLeast = -1e4f;
  return g < kLeast ? kLeast : g;
}

// By a warp: log decays of tokens 2 lane and 2 lane + 1 of a chunk become sums over the tokens up to each. In double:
// a difference of two sums must keep its digits where a decay before both is strong.
FW_DEVICE void sum_log_decays(double (&g)[2], int lane) {
  double sum = g[0] + g[1];
  FW_UNROLL for (int delta = 1; delta < 32; delta *= 2) {
    const double before = move_double(sum, [&](uint32_t word) { return shuffle_up(word, delta); });
    if (lane >= delta) sum += before;
  }
  g[0] = sum - g[1], g[1] = sum;
}

// The first slot of sequence n: no two sequences share one (scratch.h).
FW_DEVICE int64_t first_mesa_slot(const PassSequences& sequences, int64_t n) {
  return sequences.offsets[n] / kMesaChunk + n;
}

// The chunk of a slot: its first token and its number of tokens, none where the slot has no chunk.
struct MesaChunk {
  int64_t first;
  int rows;
  FW_DEVICE MesaChunk(const PassSequences& sequences, int64_t slot) {
    int64_t low = 0, high = sequences.count;  // first slot of low <= slot < first slot of high
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_mesa_slot(sequences, middle) <= slot ? low : high) = middle;
    }
    const int64_t begin = sequences.offsets[low], end = sequences.offsets[low + 1];
    first = begin + (slot - first_mesa_slot(sequences, low)) * kMesaChunk;
    rows = static_cast<int>(max(int64_t{0}, min(kMesaChunk, end - first)));
  }
};

// K is 64 or 128. states: mesa_scratch() of scratch.h.
void mesa_states(const MesaArgs<Bf16>& a, Bf16* states, void* stream);
void mesa_chunks(const MesaArgs<Bf16>& a, const Bf16* states, void* stream);

}  // namespace fw::cuda
