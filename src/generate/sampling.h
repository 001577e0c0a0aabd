// Sampling: one token id from the logits of the next token.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace fw {

struct Sampling {
  double temperature = 1.0;         // 0: greedy
  int64_t top_k = 0;                // only the k likeliest; 0: off
  double top_p = 1.0;               // nucleus: only the likeliest that together reach this probability; 1: off
  double min_p = 0.0;               // only what has at least this share of the likeliest one's probability; 0: off
  double repetition_penalty = 1.0;  // > 1: ids among the recent ones become less likely; 1: off
  int64_t repetition_window = 64;   // how many tokens are recent
};
// Longest repetition_window.
inline constexpr int64_t kMostRecent = 4096;

// Throws Error(kUsage) naming the key, what was expected and what came.
void validate(const Sampling& sampling);

// One id from logits [vocab], by four steps in this order:
//   the logit of each id in `recent` (however often it is there) divided by repetition_penalty where it is positive, multiplied
//   where it is negative;
//   softmax(logits / temperature) restricted to top_k;
//   that, renormalised, to top_p;
//   and of what is left only what has min_p of the likeliest one's probability.
// Deterministic for a state of `random`, of which greedy takes nothing and everything else one number; ties go to the smaller id.
// Of `recent` only the last repetition_window count. Throws Error(kNumeric) when a logit is NaN or none is finite.
int32_t sample(std::span<const float> logits, std::span<const int32_t> recent, const Sampling& sampling, Random& random);

// The natural logarithm of the probability of `id` in softmax(logits): what the model says, before sampling changes it.
double log_probability(std::span<const float> logits, int32_t id);

}  // namespace fw
