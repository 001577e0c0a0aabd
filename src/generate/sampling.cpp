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

}  // namespace

void validate(const Sampling& sampling) {
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    fail_usage("temperature: expected a number >= 0 (0: greedy), got {}", sampling.temperature);
  }
  if (sampling.top_k < 0) fail_usage("top_k: expected a whole number >= 0 (0: off), got {}", sampling.top_k);
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) fail_usage("top_p: expected a number > 0 and <= 1 (1: off), got {}", sampling.top_p);
}

int32_t sample(std::span<const float> logits, const Sampling& sampling, Random& random) {
  validate(sampling);
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
  size_t count = ids.size();
  if (sampling.top_p < 1) {
    const double enough = sampling.top_p * total;
    double sum = 0;
    count = 0;
    while (count < ids.size() && (count == 0 || sum < enough)) sum += weights[count++];
    total = sum;
  }
  const double point = random.uniform() * total;
  double sum = 0;
  for (size_t i = 0; i + 1 < count; ++i) {
    sum += weights[i];
    if (point < sum) return ids[i];
  }
  return ids[count - 1];
}

}  // namespace fw
