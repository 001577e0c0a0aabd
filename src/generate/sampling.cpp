#include "generate/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "ops/cpu/sampling.h"

namespace fw {
namespace {

// Says which logit is damaged.
void check(std::span<const float> logits) {
  float largest = -INFINITY;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]))
      fail_numeric("sampling: the logit of token {} is NaN: the model's parameters or its state are damaged", i);
    largest = std::max(largest, logits[i]);
  }
  if (!std::isfinite(largest))
    fail_numeric("sampling: no finite largest logit among {}: the model's parameters or its state are damaged",
                 logits.size());
}

}  // namespace

void validate(const Sampling& sampling) {
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    fail_usage("temperature: expected a number >= 0 (0: greedy), got {}", sampling.temperature);
  }
  if (sampling.top_k < 0) fail_usage("top_k: expected a whole number >= 0 (0: off), got {}", sampling.top_k);
  if (!(sampling.top_p > 0 && sampling.top_p <= 1))
    fail_usage("top_p: expected a number > 0 and <= 1 (1: off), got {}", sampling.top_p);
  if (!(sampling.min_p >= 0 && sampling.min_p <= 1))
    fail_usage("min_p: expected a number from 0 (off) to 1, got {}", sampling.min_p);
  if (!(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty))) {
    fail_usage("repetition_penalty: expected a number > 0 (1: off), got {}", sampling.repetition_penalty);
  }
  if (sampling.repetition_window < 0 || sampling.repetition_window > kMostRecent) {
    fail_usage("repetition_window: expected 0 to {} tokens, got {}", kMostRecent, sampling.repetition_window);
  }
}

void require_drawn(const Drawn& drawn) {
  if (drawn.id < 0)
    fail_numeric("sampling: a logit is NaN, or none is finite: the model's parameters or its state are damaged");
}

int32_t sample(std::span<const float> logits, std::span<const int32_t> recent, const Sampling& sampling,
               Random& random) {
  validate(sampling);
  check(logits);
  return choose_token(logits, recent, sampling, sampling.temperature == 0 ? 0.0 : random.uniform());
}

double log_probability(std::span<const float> logits, int32_t id) {
  check(logits);
  return token_log_probability(logits, id);
}

}  // namespace fw
