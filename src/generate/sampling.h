// Sampling: one token id from the logits of the next token.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"
#include "ops/sampling.h"

namespace fw {

// Throws Error(kUsage) naming the key, what was expected and what came.
void validate(const Sampling& sampling);
// Throws Error(kNumeric) where the logits of a draw were damaged.
void require_drawn(const Drawn& drawn);

// One id from logits [vocab], by four steps in this order:
// - The logit of each id in `recent` (however often it is there) is divided by repetition_penalty where it is positive,
//   multiplied where it is negative.
// - softmax(logits / temperature) is restricted to top_k.
// - That, renormalised, is restricted to top_p.
// - Of what is left only ids with at least min_p of the likeliest one's probability stay.
//
// Deterministic for a state of `random`, of which greedy takes nothing and everything else one number; ties go to the
// smaller id. Of `recent` only the last repetition_window count. Throws Error(kNumeric) when a logit is NaN or none is
// finite.
int32_t sample(std::span<const float> logits, std::span<const int32_t> recent, const Sampling& sampling,
               Random& random);

// The natural logarithm of the probability of `id` in softmax(logits): what the model says, before sampling changes it.
double log_probability(std::span<const float> logits, int32_t id);

}  // namespace fw
