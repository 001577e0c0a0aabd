#include "generate/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace fw {
namespace {

// Index of the largest logit, the smallest of equal ones.
size_t likeliest(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) fail_numeric("sampling: the logit of token {} is NaN: the model's parameters or its state are damaged", i);
    if (logits[i] > logits[best]) best = i;
  }
  if (logits.empty() || !std::isfinite(logits[best]))
    fail_numeric("sampling: no finite largest logit among {}: the model's parameters or its state are damaged", logits.size());
  return best;
}

// The ids that recur, less likely.
void penalise(std::span<float> logits, std::span<const int32_t> recent, const Sampling& sampling) {
  std::vector<int32_t> ids(recent.end() - std::min<int64_t>(sampling.repetition_window, static_cast<int64_t>(recent.size())), recent.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const int32_t id : ids) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) continue;  // of a vocabulary padded beyond the tokenizer's
    float& x = logits[static_cast<size_t>(id)];
    x = static_cast<float>(x > 0 ? x / sampling.repetition_penalty : x * sampling.repetition_penalty);
  }
}

// The place in `weights` (falling) that a random number falls into.
size_t draw(std::span<const double> weights, double total, Random& random) {
  const double point = random.uniform() * total;
  double sum = 0;
  for (size_t i = 0; i + 1 < weights.size(); ++i) {
    sum += weights[i];
    if (point < sum) return i;
  }
  return weights.size() - 1;
}

int32_t choose(std::span<const float> logits, const Sampling& sampling, Random& random) {
  const size_t best = likeliest(logits);
  if (sampling.temperature == 0) return static_cast<int32_t>(best);

  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [logits](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + (sampling.top_k - 1), ids.end(), likelier);
    ids.resize(static_cast<size_t>(sampling.top_k));
  }
  // One order for every setting, so that the same random number means the same quantile of the distribution.
  std::sort(ids.begin(), ids.end(), likelier);

  std::vector<double> weights(ids.size());
  double total = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    weights[i] = std::exp((static_cast<double>(logits[static_cast<size_t>(ids[i])]) - logits[best]) / sampling.temperature);
    total += weights[i];
  }
  const auto keep = [&](size_t count) {
    weights.resize(count);
    total = std::accumulate(weights.begin(), weights.end(), 0.0);
  };
  if (sampling.top_p < 1) {
    const double enough = sampling.top_p * total;
    double sum = 0;
    size_t count = 0;
    while (count < weights.size() && (count == 0 || sum < enough)) sum += weights[count++];
    keep(count);
  }
  if (sampling.min_p > 0) {
    const auto first_less = std::find_if(weights.begin() + 1, weights.end(), [&](double w) { return w < sampling.min_p * weights[0]; });
    keep(static_cast<size_t>(first_less - weights.begin()));
  }
  return ids[draw(weights, total, random)];
}

}  // namespace

void validate(const Sampling& sampling) {
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    fail_usage("temperature: expected a number >= 0 (0: greedy), got {}", sampling.temperature);
  }
  if (sampling.top_k < 0) fail_usage("top_k: expected a whole number >= 0 (0: off), got {}", sampling.top_k);
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) fail_usage("top_p: expected a number > 0 and <= 1 (1: off), got {}", sampling.top_p);
  if (!(sampling.min_p >= 0 && sampling.min_p <= 1)) fail_usage("min_p: expected a number from 0 (off) to 1, got {}", sampling.min_p);
  if (!(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty))) {
    fail_usage("repetition_penalty: expected a number > 0 (1: off), got {}", sampling.repetition_penalty);
  }
  if (sampling.repetition_window < 0 || sampling.repetition_window > kMostRecent) {
    fail_usage("repetition_window: expected 0 to {} tokens, got {}", kMostRecent, sampling.repetition_window);
  }
}

int32_t sample(std::span<const float> logits, std::span<const int32_t> recent, const Sampling& sampling, Random& random) {
  validate(sampling);
  if (sampling.repetition_penalty == 1 || recent.empty()) return choose(logits, sampling, random);
  likeliest(logits);  // damaged ones are refused as they came
  std::vector<float> changed(logits.begin(), logits.end());
  penalise(changed, recent, sampling);
  return choose(changed, sampling, random);
}

double log_probability(std::span<const float> logits, int32_t id) {
  const double largest = logits[likeliest(logits)];
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return logits[static_cast<size_t>(id)] - largest - std::log(sum);
}

}  // namespace fw
