#include "generate/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"

namespace fw {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNoChance = -std::numeric_limits<float>::infinity();

const std::vector<float> kLogits = {0.5f, -1.0f, 2.0f, 2.0f, 0.0f, -3.0f, 1.0f};

std::vector<double> softmax(const std::vector<float>& logits, double temperature, const std::vector<size_t>& kept) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (const size_t i : kept) sum += p[i] = std::exp(logits[i] / temperature);
  for (double& x : p) x /= sum;
  return p;
}

// Frequencies of 40,000 samples lie within five standard deviations of `expected`; what has no probability never comes.
void expect_distribution(const Sampling& sampling, const std::vector<double>& expected,
                         const std::vector<int32_t>& recent = {}) {
  constexpr int kSamples = 40000;
  Random random(99);
  std::vector<int> counts(kLogits.size());
  for (int i = 0; i < kSamples; ++i) ++counts[static_cast<size_t>(sample(kLogits, recent, sampling, random))];
  for (size_t i = 0; i < counts.size(); ++i) {
    const double p = expected[i];
    EXPECT_NEAR(counts[i], kSamples * p, 5 * std::sqrt(kSamples * p * (1 - p))) << "id " << i;
  }
}

TEST(Sampling, FollowsTheSoftmax) {
  const std::vector<size_t> all = {0, 1, 2, 3, 4, 5, 6};
  for (const double temperature : {1.0, 0.5, 3.0})
    expect_distribution({temperature, 0, 1.0}, softmax(kLogits, temperature, all));
}

TEST(Sampling, TopKKeepsTheLikeliestOnes) {
  expect_distribution({1.0, 3, 1.0}, softmax(kLogits, 1.0, {2, 3, 6}));
  expect_distribution({1.0, 7, 1.0}, softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6}));
  expect_distribution({1.0, 1000, 1.0}, softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6}));
  // Of equal ones the smaller id is the likelier.
  expect_distribution({1.0, 1, 1.0}, softmax(kLogits, 1.0, {2}));
}

TEST(Sampling, TopPKeepsTheFewestThatReachIt) {
  // Probabilities, likeliest first: 2 and 3: 0.3494 each, 6: 0.1285, 0: 0.0780, 4: 0.0473, 1: 0.0174, 5: 0.0024.
  const std::vector<double> p = softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6});
  expect_distribution({1.0, 0, p[2] * 0.99}, softmax(kLogits, 1.0, {2}));
  expect_distribution({1.0, 0, p[2] * 1.01}, softmax(kLogits, 1.0, {2, 3}));
  expect_distribution({1.0, 0, 0.8}, softmax(kLogits, 1.0, {2, 3, 6}));
  expect_distribution({1.0, 0, 1e-300}, softmax(kLogits, 1.0, {2}));
  expect_distribution({1.0, 0, 1 - 1e-9}, p);
  // The temperature comes first: at 0.1 the two likeliest have all but 5e-5 of the probability.
  expect_distribution({0.1, 0, 0.999}, softmax(kLogits, 0.1, {2, 3}));
}

TEST(Sampling, TopPCountsWithinTopK) {
  // Of {2, 3, 6}, 0.80 is not reached by 2 and 3 together before, but is after renormalisation (0.845).
  expect_distribution({1.0, 3, 0.8}, softmax(kLogits, 1.0, {2, 3}));
}

TEST(Sampling, MinPKeepsWhatIsNotFarBelowTheLikeliest) {
  // Over the likeliest: 6 has 0.368, 0 has 0.223, 4 has 0.135, 1 has 0.0498, 5 has 0.0067.
  expect_distribution({1.0, 0, 1.0, 0.2}, softmax(kLogits, 1.0, {2, 3, 6, 0}));
  expect_distribution({1.0, 0, 1.0, 0.4}, softmax(kLogits, 1.0, {2, 3}));
  expect_distribution({1.0, 0, 1.0, 1.0}, softmax(kLogits, 1.0, {2, 3}));
  expect_distribution({1.0, 0, 1.0, 0.001}, softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6}));
  // The temperature comes first, top_p before: at 2 the ratios are the square roots, and 0.8 of the probability is {2,
  // 3, 6, 0}.
  expect_distribution({2.0, 0, 1.0, 0.4}, softmax(kLogits, 2.0, {2, 3, 6, 0}));
  expect_distribution({1.0, 0, 0.8, 0.001}, softmax(kLogits, 1.0, {2, 3, 6}));
}

// Logits of recent ids: over the penalty where they are positive, times it where they are negative; once, however often
// they came.
TEST(Sampling, RepetitionPenaltyChangesRecentIdsOnly) {
  Sampling sampling;
  sampling.repetition_penalty = 2;
  sampling.repetition_window = 4;
  const std::vector<float> changed = {0.5f, -2.0f, 1.0f, 2.0f, 0.0f, -3.0f, 1.0f};
  // 6 and 5 lie before the window
  expect_distribution(sampling, softmax(changed, 1.0, {0, 1, 2, 3, 4, 5, 6}), {6, 5, 2, 1, 2, 1});
  expect_distribution(sampling, softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6}), {});
  sampling.repetition_window = 0;
  expect_distribution(sampling, softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6}), {1, 2});
  // Greedy sees it too; ids of a padded vocabulary are none.
  Random random(1);
  EXPECT_EQ(sample(kLogits, std::vector<int32_t>{2, 700, -1}, {0.0, 0, 1.0, 0.0, 1.5}, random), 3);
  EXPECT_EQ(sample(kLogits, std::vector<int32_t>{2}, {0.0, 0, 1.0, 0.0, 1.0}, random), 2);
  EXPECT_EQ(sample(kLogits, std::vector<int32_t>{0}, {0.0, 0, 1.0, 0.0, 0.1}, random), 0) << "below 1: likelier";
}

TEST(Sampling, LogProbabilitiesAreThoseOfTheModel) {
  const std::vector<double> p = softmax(kLogits, 1.0, {0, 1, 2, 3, 4, 5, 6});
  for (size_t i = 0; i < kLogits.size(); ++i)
    EXPECT_NEAR(log_probability(kLogits, static_cast<int32_t>(i)), std::log(p[i]), 1e-14);
  EXPECT_NEAR(log_probability(std::vector<float>{3e38f, 3e38f}, 1), -std::log(2.0), 1e-15);
  EXPECT_EQ(log_probability(std::vector<float>{kNoChance, 3}, 0), -kInf);
}

TEST(Sampling, GreedyTakesTheLikeliestAndNoRandomNumber) {
  Random random(1), untouched(1);
  EXPECT_EQ(sample(kLogits, {}, {0.0, 0, 1.0}, random), 2);
  EXPECT_EQ(sample(std::vector<float>{1, 1, 1}, {}, {0.0, 0, 1.0}, random), 0);
  EXPECT_EQ(sample(std::vector<float>{kNoChance, -5, kNoChance}, {}, {0.0, 0, 1.0}, random), 1);
  EXPECT_EQ(random.save(), untouched.save());
}

TEST(Sampling, EverythingElseTakesOneRandomNumber) {
  for (const Sampling& sampling : {Sampling{1, 0, 1}, Sampling{1, 1, 1}, Sampling{0.5, 3, 0.1}, Sampling{2, 0, 0.9},
                                   Sampling{1, 0, 1, 0.3, 1.2}}) {
    Random random(1), reference(1);
    sample(kLogits, {}, sampling, random);
    reference.uniform();
    EXPECT_EQ(random.save(), reference.save());
  }
}

TEST(Sampling, ExtremesStayInRange) {
  Random random(2);
  // A temperature that overflows every difference is greedy; one that flattens all is uniform.
  for (int i = 0; i < 50; ++i) EXPECT_EQ(sample(std::vector<float>{1, 3, 2}, {}, {1e-300, 0, 1.0}, random), 1);
  for (int i = 0; i < 50; ++i) EXPECT_LT(sample(std::vector<float>{-3e38f, 3e38f}, {}, {1e300, 0, 1.0}, random), 2);
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(sample(std::vector<float>{kNoChance, 0, kNoChance}, {}, {5.0, 0, 1.0}, random), 1);
  EXPECT_EQ(sample(std::vector<float>{7}, {}, {1.0, 5, 0.5}, random), 0);
}

TEST(Sampling, RefusesDamagedLogits) {
  Random random(3);
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const double temperature : {0.0, 1.0}) {
    for (const std::vector<float>& logits :
         {std::vector<float>{0, nan}, {nan, 0}, {0, inf}, {kNoChance, kNoChance}, {}}) {
      try {
        sample(logits, {}, {temperature, 0, 1.0}, random);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kNumeric);
      }
    }
  }
}

TEST(Sampling, RefusesSettingsThatCannotBe) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Sampling& bad :
       {Sampling{-0.1, 0, 1}, Sampling{nan, 0, 1}, Sampling{kInf, 0, 1}, Sampling{1, -1, 1}, Sampling{1, 0, 0},
        Sampling{1, 0, 1.01}, Sampling{1, 0, -0.5}, Sampling{1, 0, nan}, Sampling{1, 0, 1, -0.1},
        Sampling{1, 0, 1, 1.1}, Sampling{1, 0, 1, nan}, Sampling{1, 0, 1, 0, 0}, Sampling{1, 0, 1, 0, kInf},
        Sampling{1, 0, 1, 0, nan}, Sampling{1, 0, 1, 0, 1, -1}, Sampling{1, 0, 1, 0, 1, kMostRecent + 1}}) {
    EXPECT_THROW(validate(bad), Error);
    Random random(1);
    EXPECT_THROW(sample(kLogits, {}, bad, random), Error);
  }
  EXPECT_NO_THROW(validate(Sampling{}));
}

}  // namespace
}  // namespace fw
