// A token from one row of logits, on the host: what generate/sampling.h defines.
#pragma once

#include <cstdint>
#include <span>

#include "ops/sampling.h"

namespace fw {

// From logits [vocab] and the recent ids, oldest first, of which the last repetition_window count; uniform of [0, 1)
// says which (greedy: not read). -1: a logit is NaN, or none is finite.
template <class T>
int32_t choose_token(std::span<const T> logits, std::span<const int32_t> recent, const Sampling& sampling,
                     double uniform);

// The natural logarithm of the probability of `id` in softmax(logits), whose largest is finite.
template <class T>
double token_log_probability(std::span<const T> logits, int32_t id);

}  // namespace fw
