#include "tasks/recall.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace fw {
namespace {

void check_vocabulary(int64_t vocab_size) {
  constexpr int64_t kMost = int64_t{1} << 24;
  if (vocab_size < 2 || vocab_size % 2 != 0 || vocab_size > kMost)
    fail_usage("vocab_size: expected an even number from 2 to {} (keys are its lower half, values its upper), got {}",
               kMost, vocab_size);
}

int32_t below(Random& random, int64_t n) { return static_cast<int32_t>(random.below(static_cast<uint64_t>(n))); }

// `count` numbers of [0, n), none twice, in random order.
std::vector<int32_t> distinct(Random& random, int64_t n, int64_t count) {
  std::vector<int32_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < count; ++i)
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + below(random, n - i))]);
  all.resize(static_cast<size_t>(count));
  return all;
}

class KaczmarzMqar : public SyntheticTask {
 public:
  explicit KaczmarzMqar(const TaskOptions& options) : options_(options) {
    check_vocabulary(options.vocab_size);
    if (options.pairs < 1 || options.pairs > options.length)
      fail_usage("pairs: expected 1 to the length, {}, got {}", options.length, options.pairs);
    if (options.length < 2 * options.pairs + 3)
      fail_usage("length: expected at least 2 pairs + 3 = {} for {} pairs, got {}", 2 * options.pairs + 3,
                 options.pairs, options.length);
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(options_.vocab_size); }
  int64_t length() const override { return options_.length; }
  bool recalls_pairs() const override { return true; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    const int64_t half = options_.vocab_size / 2, context = 2 * options_.pairs;
    for (int64_t i = 0; i < context; ++i)
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>(i % 2 * half) + below(random, half);
    for (size_t i = static_cast<size_t>(context); i < tokens.size(); ++i)
      tokens[i] = below(random, options_.vocab_size);
    // The inverse of the distribution function of x^-0.1 between the first and the last place.
    constexpr double kPower = 0.9;
    const double low = std::pow(context, kPower), high = std::pow(options_.length - 2, kPower);
    for (const int32_t pair : distinct(random, options_.pairs, options_.pairs)) {
      const auto position = static_cast<int64_t>(std::pow(random.uniform() * (high - low) + low, 1 / kPower));
      // of sums that round past the ends
      const auto at = static_cast<size_t>(std::clamp(position, context, options_.length - 3));
      tokens[at] = tokens[2 * static_cast<size_t>(pair)];
      labels[at] = tokens[2 * static_cast<size_t>(pair) + 1];
    }
  }

 private:
  TaskOptions options_;
};

class ZoologyMqar : public SyntheticTask {
 public:
  explicit ZoologyMqar(const TaskOptions& options) : options_(options), context_(2 * options.pairs * options.passes) {
    check_vocabulary(options.vocab_size);
    if (options.pairs < 1 || options.pairs >= options.vocab_size / 2)
      fail_usage("pairs: expected 1 to {} (keys are distinct, 0 is none), got {}", options.vocab_size / 2 - 1,
                 options.pairs);
    if (options.passes < 1 || options.passes > options.length)
      fail_usage("passes: expected 1 to the length, {}, got {}", options.length, options.passes);
    if (options.length % 2 != 0 || context_ + 2 * options.pairs > options.length)
      fail_usage("length: expected an even number of at least 2 pairs (passes + 1) = {}, got {}",
                 context_ + 2 * options.pairs, options.length);
    if (!(options.power > 0) || options.power > 100)
      fail_usage("power: expected a number above 0, up to 100, got {}", options.power);
    for (int64_t i = 1; i <= (options.length - context_) / 2; ++i)
      weights_.push_back((options.power - 1) * std::log(static_cast<double>(i)));
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(options_.vocab_size); }
  int64_t length() const override { return options_.length; }
  bool recalls_pairs() const override { return true; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    const int64_t half = options_.vocab_size / 2, pairs = options_.pairs;
    const std::vector<int32_t> keys = distinct(random, half - 1, pairs), values = distinct(random, half, pairs);
    std::ranges::fill(tokens, 0);
    for (int64_t i = 0; i < context_; ++i) {
      const auto pair = static_cast<size_t>(i / 2 % pairs);
      tokens[static_cast<size_t>(i)] = i % 2 == 0 ? keys[pair] + 1 : values[pair] + static_cast<int32_t>(half);
    }
    const std::vector<int32_t> distances = distances_of(random);
    for (size_t pair = 0; pair < static_cast<size_t>(pairs); ++pair) {
      const auto at = static_cast<size_t>(context_ + 2 * distances[pair]);
      tokens[at] = keys[pair] + 1;
      labels[at] = values[pair] + static_cast<int32_t>(half);
    }
    if (!options_.noise) return;
    for (int32_t& token : tokens) {
      if (token == 0) token = below(random, options_.vocab_size);
    }
  }

 private:
  // Places drawn one after the other without replacement are the order of log weight + Gumbel noise.
  std::vector<int32_t> distances_of(Random& random) const {
    std::vector<std::pair<double, int32_t>> order;
    for (size_t i = 0; i < weights_.size(); ++i) {
      const double u = 1 - random.uniform();  // (0, 1]
      order.emplace_back(weights_[i] - std::log(-std::log(u) + 1e-300), static_cast<int32_t>(i));
    }
    std::ranges::partial_sort(order, order.begin() + options_.pairs, std::greater<>());
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < options_.pairs; ++i) positions.push_back(order[static_cast<size_t>(i)].second);
    return positions;
  }

  TaskOptions options_;
  int64_t context_;
  std::vector<double> weights_;  // logarithms, by place
};

}  // namespace

std::unique_ptr<SyntheticTask> kaczmarz_mqar(const TaskOptions& options) {
  return std::make_unique<KaczmarzMqar>(options);
}
std::unique_ptr<SyntheticTask> zoology_mqar(const TaskOptions& options) {
  return std::make_unique<ZoologyMqar>(options);
}

}  // namespace fw
