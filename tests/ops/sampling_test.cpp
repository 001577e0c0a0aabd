// Drawing a token: greedy and restricted choices, what a draw leaves in its streams, logits that nothing can be drawn
// from. The law itself (temperature, top-k, top-p, min-p, penalties) is tested where it is defined, tests/generate;
// this is the operation over several sequences.
#include "ops/cpu/sampling.h"

#include "op_check.h"

namespace fw::testing {
namespace {

constexpr int64_t kVocab = 40, kIds = 37;  // the last three are no tokens

struct Streams {
  std::vector<double> uniform;
  std::vector<int32_t> recent;
  std::vector<int64_t> seen, positions;
  std::vector<int32_t> ids;
  std::vector<Drawn> drawn;

  explicit Streams(int64_t n, double u)
      : uniform(static_cast<size_t>(n), u),
        recent(static_cast<size_t>(n * kMostRecent)),
        seen(uniform.size(), 2),
        positions(uniform.size(), 9),
        ids(uniform.size(), -7),
        drawn(uniform.size()) {
    for (int64_t i = 0; i < n; ++i)
      recent[static_cast<size_t>(i * kMostRecent)] = 3, recent[static_cast<size_t>(i * kMostRecent + 1)] = 5;
  }
  DrawStreams view(bool logprobs) {
    return {uniform.data(), recent.data(), seen.data(), positions.data(), ids.data(), drawn.data(), logprobs};
  }
};

template <class T>
void check_draws(const Sampling& sampling, double u) {
  constexpr int64_t kSequences = 5;
  Random random(4);
  Strided<T> logits(kSequences, kVocab);
  for (int64_t n = 0; n < kSequences; ++n) {
    for (int64_t i = 0; i < kVocab; ++i)
      logits.mat().row(n)[i] = static_cast<T>(i < kIds ? 3 * random.normal() : 100.0);
  }
  logits.mat().row(4)[7] = std::numeric_limits<T>::quiet_NaN();
  Streams streams(kSequences, u);
  host_ops<T>().sample_tokens(host_exec<T>(), logits.view(), kIds, sampling, streams.view(true));
  const std::vector<int32_t> recent = {3, 5};
  for (size_t n = 0; n < static_cast<size_t>(kSequences); ++n) {
    const std::span<const T> row(logits.view().row(static_cast<int64_t>(n)), static_cast<size_t>(kIds));
    const int32_t want = choose_token<T>(row, recent, sampling, u);
    EXPECT_EQ(streams.drawn[n].id, want) << n;
    EXPECT_EQ(want < 0, n == 4) << n;
    EXPECT_LT(want, kIds) << "no token";
    EXPECT_EQ(streams.ids[n], want < 0 ? 0 : want);
    EXPECT_EQ(streams.seen[n], 3);
    EXPECT_EQ(streams.positions[n], 10);
    EXPECT_EQ(streams.recent[n * kMostRecent + 2], streams.ids[n]);
    if (want < 0) continue;
    double sum = 0;  // over all logits: a probability is the model's, whose vocabulary may be padded
    for (int64_t i = 0; i < kVocab; ++i)
      sum += std::exp(static_cast<double>(logits.view().row(static_cast<int64_t>(n))[i]));
    EXPECT_NEAR(streams.drawn[n].logprob, static_cast<double>(row[static_cast<size_t>(want)]) - std::log(sum), 1e-6);
  }
  logits.values();  // nothing was written beside the logits
}

TEST(SampleTokens, GreedyTakesTheLargestAndOfEqualsTheFirst) {
  Sampling greedy;
  greedy.temperature = 0;
  check_draws<float>(greedy, 0.0);
  check_draws<double>(greedy, 0.0);
  const std::vector<float> equal = {1, 4, 2, 4};
  EXPECT_EQ(choose_token<float>(equal, {}, greedy, 0.9), 1);
}

TEST(SampleTokens, DrawsByTheNumberGiven) {
  for (const double u : {0.0, 0.3, 0.999}) {
    Sampling all;
    check_draws<float>(all, u);
    Sampling some;
    some.temperature = 0.7;
    some.top_k = 10;
    some.top_p = 0.8;
    some.repetition_penalty = 1.3;
    check_draws<float>(some, u);
    check_draws<double>(some, u);
  }
}

}  // namespace
}  // namespace fw::testing
