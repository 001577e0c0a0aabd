// Sampling: one token id from the logits of the next token.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace fw {

struct Sampling {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // only the k likeliest; 0: off
  double top_p = 1.0;        // nucleus: only the likeliest that together reach this probability; 1: off
};
// Throws Error(kUsage) naming the key, what was expected and what came.
void validate(const Sampling& sampling);

// One id from logits [vocab], softmax(logits / temperature) restricted to top_k, then (renormalised) to top_p. Deterministic
// for a state of `random`, of which greedy takes nothing and everything else one number; ties go to the smaller id.
// Throws Error(kNumeric) when a logit is NaN or none is finite.
int32_t sample(std::span<const float> logits, const Sampling& sampling, Random& random);

}  // namespace fw
