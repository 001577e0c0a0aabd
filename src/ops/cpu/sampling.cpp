#include "ops/cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/softmax_rows.h"

namespace fw {
namespace {

// Index of the largest logit, the smallest of equal ones; none of a NaN, or where it is not finite.
template <class T>
int32_t likeliest(std::span<const T> logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return logits.empty() || !std::isfinite(logits[best]) ? -1 : static_cast<int32_t>(best);
}

// The ids that recur, less likely.
template <class T>
void penalise(std::span<T> logits, std::span<const int32_t> recent, const Sampling& sampling) {
  std::vector<int32_t> ids(
      recent.end() - std::min<int64_t>(sampling.repetition_window, static_cast<int64_t>(recent.size())), recent.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const int32_t id : ids) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) continue;  // of a vocabulary padded beyond the tokenizer's
    T& x = logits[static_cast<size_t>(id)];
    x = static_cast<T>(x > 0 ? x / sampling.repetition_penalty : x * sampling.repetition_penalty);
  }
}

// The index in `weights` (falling) that a random number falls into.
size_t index_at(std::span<const double> weights, double total, double uniform) {
  const double point = uniform * total;
  double sum = 0;
  for (size_t i = 0; i + 1 < weights.size(); ++i) {
    sum += weights[i];
    if (point < sum) return i;
  }
  return weights.size() - 1;
}

template <class T>
int32_t choose(std::span<const T> logits, const Sampling& sampling, double uniform) {
  const int32_t best = likeliest(logits);
  if (best < 0 || sampling.temperature == 0) return best;

  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [logits](int32_t a, int32_t b) {
    const T x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
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
  const double largest = static_cast<double>(logits[static_cast<size_t>(best)]);
  for (size_t i = 0; i < ids.size(); ++i) {
    weights[i] = std::exp((static_cast<double>(logits[static_cast<size_t>(ids[i])]) - largest) / sampling.temperature);
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
    const auto first_less =
        std::find_if(weights.begin() + 1, weights.end(), [&](double w) { return w < sampling.min_p * weights[0]; });
    keep(static_cast<size_t>(first_less - weights.begin()));
  }
  return ids[index_at(weights, total, uniform)];
}

}  // namespace

template <class T>
int32_t choose_token(std::span<const T> logits, std::span<const int32_t> recent, const Sampling& sampling,
                     double uniform) {
  if (sampling.repetition_penalty == 1 || recent.empty()) return choose(logits, sampling, uniform);
  if (likeliest(logits) < 0) return -1;  // damaged ones are refused as they came
  std::vector<T> changed(logits.begin(), logits.end());
  penalise(std::span<T>(changed), recent, sampling);
  return choose(std::span<const T>(changed), sampling, uniform);
}

template <class T>
double token_log_probability(std::span<const T> logits, int32_t id) {
  const double largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const T x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return static_cast<double>(logits[static_cast<size_t>(id)]) - largest - std::log(sum);
}

template int32_t choose_token(std::span<const float>, std::span<const int32_t>, const Sampling&, double);
template int32_t choose_token(std::span<const double>, std::span<const int32_t>, const Sampling&, double);
template double token_log_probability(std::span<const float>, int32_t);
template double token_log_probability(std::span<const double>, int32_t);

namespace cpu {

template <class T>
void sample_tokens(const Exec<T>& exec, Mat<const T> logits, int64_t vocab, const Sampling& sampling,
                   const DrawStreams& streams) {
  std::vector<int32_t> recent;
  for (int64_t n = 0; n < logits.rows; ++n) {
    const std::span<const T> row(logits.row(n), static_cast<size_t>(vocab));
    int32_t* ring = streams.recent + n * kMostRecent;
    int64_t& seen = streams.seen[n];
    recent.clear();
    if (sampling.repetition_penalty != 1) {
      for (int64_t i = std::max<int64_t>(seen - std::min(sampling.repetition_window, kMostRecent), 0); i < seen; ++i)
        recent.push_back(ring[i % kMostRecent]);
    }
    Drawn& drawn = streams.drawn[n];
    drawn.id = choose_token<T>(row, recent, sampling, streams.uniform[n]);
    if (streams.logprobs && drawn.id >= 0) {
      if (exec.decode_bits) {  // as the loss has it
        T nll;
        std::vector<T> copy(logits.row(n), logits.row(n) + logits.cols);
        softmax_nll(Mat<T>(copy.data(), 1, logits.cols), &drawn.id, &nll);
        drawn.logprob = -static_cast<double>(nll);
      } else {
        drawn.logprob =
            token_log_probability(std::span<const T>(logits.row(n), static_cast<size_t>(logits.cols)), drawn.id);
      }
    }
    streams.ids[n] = std::max(drawn.id, 0);
    ring[seen++ % kMostRecent] = streams.ids[n];
    ++streams.positions[n];
    if (streams.ring_positions != nullptr)
      streams.ring_positions[n] = (streams.ring_positions[n] + 1) % streams.ring_tokens;
  }
}

template void sample_tokens(const Exec<float>&, Mat<const float>, int64_t, const Sampling&, const DrawStreams&);
template void sample_tokens(const Exec<double>&, Mat<const double>, int64_t, const Sampling&, const DrawStreams&);

}  // namespace cpu
}  // namespace fw
