// Synthetic tasks: where labels stand and what they are, the distributions of the papers (docs/tasks.md), examples by
// seed and index, ceilings by simulation against those computed elsewhere, accuracy by hand.
#include "tasks/synthetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/temp_folder.h"
#include "base/threads.h"
#include "support/error_of.h"
#include "tasks/needle.h"

namespace fw {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

int64_t labels_of(const TaskExample& one) {
  return static_cast<int64_t>(one.labels.size()) - std::count(one.labels.begin(), one.labels.end(), kNoLabel);
}

TEST(Synthetic, AnExampleIsOfItsSeedAndIndexAlone) {
  const testing::TempFolder folder;
  write_file_atomic(folder.path("essay"), "A text of some words. It has two sentences.\n");
  const std::vector<std::string> needles = needle_tasks();
  for (const std::string& name : synthetic_tasks()) {
    const bool essay = std::ranges::find(needles, name) != needles.end() && needs_essay(name);
    const auto task = make_task(name, {.haystack = essay ? folder.path("essay") : ""});
    const auto length = static_cast<size_t>(task->length());
    constexpr int kCount = 7;
    std::vector<int32_t> tokens(kCount * length), labels(kCount * length), tokens3(tokens), labels3(labels);
    task->examples(42, 100, kCount, tokens, labels);
    set_num_threads(3);
    task->examples(42, 100, kCount, tokens3, labels3);
    set_num_threads(0);
    EXPECT_EQ(tokens, tokens3) << name;
    EXPECT_EQ(labels, labels3) << name;
    const TaskExample fifth = task->example(42, 105);
    EXPECT_TRUE(std::equal(fifth.tokens.begin(), fifth.tokens.end(), tokens.begin() + static_cast<long>(5 * length)))
        << name;
    EXPECT_TRUE(std::equal(fifth.labels.begin(), fifth.labels.end(), labels.begin() + static_cast<long>(5 * length)))
        << name;
    EXPECT_NE(fifth.tokens, task->example(42, 106).tokens) << name;
    EXPECT_NE(fifth.tokens, task->example(43, 105).tokens) << name;
    EXPECT_NE(task->example(0, 1).tokens, task->example(1, 0).tokens) << name;
    for (const int32_t token : tokens) ASSERT_TRUE(token >= 0 && token < task->vocab_size()) << name;
    for (const int32_t label : labels)
      ASSERT_TRUE(label == kNoLabel || (label >= 0 && label < task->vocab_size())) << name;
  }
}

// Published (PCG64 of numpy): labels of an example 29.6, 30.9, 31.5, 31.7, the rest collide; a last-write memory gets
// 98.5, 97.0, 94.3, 89.0%.
TEST(Mqar, LabelsAndCeilingsOfThePaper) {
  const std::array<double, 4> labels{29.6, 30.9, 31.5, 31.7}, ceilings{0.985, 0.970, 0.943, 0.890};
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto task = make_task("mqar", {.length = 256 << i});
    constexpr int kCount = 2000;
    int64_t sum = 0;
    for (int n = 0; n < kCount; ++n) sum += labels_of(task->example(1, static_cast<uint64_t>(n)));
    EXPECT_NEAR(static_cast<double>(sum) / kCount, labels[i], 0.15) << task->length();
    EXPECT_NEAR(last_write_ceiling(*task, 1, kCount), ceilings[i], 0.003) << task->length();
  }
}

TEST(Mqar, KeysStandAtPositionsOfThePowerLaw) {
  const auto task = make_task("mqar", {.length = 512, .pairs = 1});
  constexpr int kCount = 20000;
  std::array<double, 3> below{};  // shares before the quarter points of [2, 510)
  const std::array<int64_t, 3> cuts{129, 256, 383};
  double value_sum = 0;
  for (int n = 0; n < kCount; ++n) {
    const TaskExample one = task->example(5, static_cast<uint64_t>(n));
    const auto found = std::find_if(one.labels.begin(), one.labels.end(), [](int32_t x) { return x != kNoLabel; });
    ASSERT_NE(found, one.labels.end());
    const auto at = found - one.labels.begin();
    ASSERT_TRUE(at >= 2 && at < 510);
    EXPECT_EQ(one.tokens[static_cast<size_t>(at)], one.tokens[0]);
    EXPECT_EQ(*found, one.tokens[1]);
    ASSERT_TRUE(one.tokens[0] < 4096 && one.tokens[1] >= 4096);
    for (size_t c = 0; c < cuts.size(); ++c) below[c] += at < cuts[c];
    value_sum += one.tokens[1];
  }
  const double low = std::pow(2, 0.9), high = std::pow(510, 0.9);
  for (size_t c = 0; c < cuts.size(); ++c) {
    const double p = (std::pow(cuts[c], 0.9) - low) / (high - low);
    EXPECT_NEAR(below[c] / kCount, p, 4 * std::sqrt(p * (1 - p) / kCount)) << cuts[c];
  }
  EXPECT_NEAR(value_sum / kCount, 4096 + 2047.5, 4 * 1182.4 / std::sqrt(kCount));
}

TEST(Mqar, OnePairIsSolvedWithoutKeys) {
  const auto task = make_task("one_pair", {});
  EXPECT_EQ(task->length(), 1024);
  for (uint64_t n = 0; n < 50; ++n) {
    const TaskExample one = task->example(2, n);
    EXPECT_EQ(labels_of(one), 1);
    for (const int32_t label : one.labels) EXPECT_TRUE(label == kNoLabel || label == one.tokens[1]);
  }
}

TEST(MqarZoology, PairsAreDistinctAndAskedForOnceAtEvenDistances) {
  for (const bool noise : {false, true}) {
    const auto task = make_task("mqar_zoology", {.length = 64, .pairs = 8, .passes = 2, .noise = noise});
    for (uint64_t n = 0; n < 200; ++n) {
      const TaskExample one = task->example(3, n);
      std::map<int32_t, int32_t> value;
      std::set<int32_t> values;
      for (size_t i = 0; i < 16; i += 2) {
        ASSERT_TRUE(one.tokens[i] >= 1 && one.tokens[i] < 4096);
        ASSERT_TRUE(one.tokens[i + 1] >= 4096 && one.tokens[i + 1] < 8192);
        value[one.tokens[i]] = one.tokens[i + 1];
        values.insert(one.tokens[i + 1]);
        EXPECT_EQ(one.tokens[i + 16], one.tokens[i]);
        EXPECT_EQ(one.tokens[i + 17], one.tokens[i + 1]);
      }
      ASSERT_EQ(value.size(), 8u);
      ASSERT_EQ(values.size(), 8u);
      int asked = 0, zeros = 0;
      for (size_t i = 32; i < 64; ++i) {
        zeros += one.tokens[i] == 0;
        if (one.labels[i] == kNoLabel) continue;
        ++asked;
        EXPECT_EQ(i % 2, 0u);
        EXPECT_EQ(one.labels[i], value.at(one.tokens[i]));
      }
      EXPECT_EQ(asked, 8);
      EXPECT_EQ(std::count_if(one.labels.begin(), one.labels.begin() + 32, [](int32_t x) { return x != kNoLabel; }), 0);
      EXPECT_TRUE(noise ? zeros <= 2 : zeros == 24) << zeros;
    }
  }
}

// The first pair's distance has the weights themselves; the second's are those without the first: both summed by hand.
TEST(MqarZoology, DistancesHaveTheirWeights) {
  constexpr int kCount = 40000;
  const auto task =
      make_task("mqar_zoology", {.length = 12, .pairs = 2, .vocab_size = 64, .power = 0.5, .noise = false});
  std::array<double, 4> first{}, second{}, p{}, q{};
  double total = 0;
  for (size_t i = 0; i < 4; ++i) total += p[i] = std::pow(static_cast<double>(i + 1), -0.5);
  for (double& x : p) x /= total;
  for (size_t i = 0; i < 4; ++i) {
    for (size_t j = 0; j < 4; ++j) {
      if (i != j) q[i] += p[j] * p[i] / (1 - p[j]);
    }
  }
  for (int n = 0; n < kCount; ++n) {
    const TaskExample one = task->example(9, static_cast<uint64_t>(n));
    for (size_t i = 0; i < 4; ++i) {
      if (one.tokens[4 + 2 * i] == one.tokens[0]) ++first[i];
      if (one.tokens[4 + 2 * i] == one.tokens[2]) ++second[i];
    }
  }
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(first[i] / kCount, p[i], 4 * std::sqrt(p[i] * (1 - p[i]) / kCount)) << i;
    EXPECT_NEAR(second[i] / kCount, q[i], 4 * std::sqrt(q[i] * (1 - q[i]) / kCount)) << i;
  }
}

TEST(MqarZoology, ThePapersMixture) {
  for (const auto& segments : {zoology_training(), zoology_tests()}) {
    for (const TaskSegment& s : segments)
      EXPECT_EQ(labels_of(make_task("mqar_zoology", {.length = s.length, .pairs = s.pairs})->example(1, 1)), s.pairs);
  }
  EXPECT_EQ(zoology_training().size(), 5u);
  EXPECT_EQ(zoology_tests().size(), 7u);
}

TEST(Palindrome, TheTextBackwards) {
  for (const bool first : {false, true}) {
    const auto task = make_task("palindrome", {.length = 5, .first = first});
    ASSERT_EQ(task->length(), 11);
    const TaskExample one = task->example(1, 0);
    const auto& t = one.tokens;
    EXPECT_EQ(t[5], 127);
    EXPECT_THAT(std::vector<int32_t>(t.begin() + 6, t.end()), ElementsAre(t[4], t[3], t[2], t[1], t[0]));
    const int32_t n = kNoLabel;
    EXPECT_THAT(one.labels, ElementsAre(n, n, n, n, n, first ? t[4] : n, t[3], t[2], t[1], t[0], n));
  }
  std::array<int, 127> counts{};
  for (uint64_t i = 0; i < 10; ++i) {
    const TaskExample one = make_task("palindrome", {})->example(8, i);
    for (size_t j = 0; j < 1024; ++j) ++counts[static_cast<size_t>(one.tokens[j])];
  }
  double chi2 = 0;
  for (const int count : counts) chi2 += (count - 10240 / 127.0) * (count - 10240 / 127.0) / (10240 / 127.0);
  EXPECT_NEAR(chi2, 126, 5 * std::sqrt(2 * 126.0));
}

// Published: about 33, 67, 136 and 274 labels an example at 256 to 2048 tokens.
TEST(Stack, AMachineFindsEveryLabel) {
  const std::array<double, 4> published{33, 67, 136, 274};
  for (size_t i = 0; i < published.size(); ++i) {
    const auto task = make_task("stack", {.length = 256 << i});
    double labels = 0;
    constexpr int kCount = 300;
    int64_t pushes = 0, choices = 0;
    for (int n = 0; n < kCount; ++n) {
      const TaskExample one = task->example(4, static_cast<uint64_t>(n));
      std::map<int32_t, std::vector<int32_t>> stacks;
      size_t held = 0;
      for (size_t t = 0; t + 3 <= one.tokens.size(); t += 3) {
        const int32_t what = one.tokens[t], which = one.tokens[t + 1], last = one.tokens[t + 2];
        ASSERT_TRUE(which >= 0 && which < 64);
        EXPECT_EQ(one.labels[t], kNoLabel);
        EXPECT_EQ(one.labels[t + 2], kNoLabel);
        if (held > 0) ++choices, pushes += what == 90;
        if (what == 90) {
          ASSERT_TRUE(last >= 64 && last < 90);
          EXPECT_EQ(one.labels[t + 1], kNoLabel);
          stacks[which].push_back(last), ++held;
        } else {
          ASSERT_EQ(what, 91);
          EXPECT_EQ(last, 92);
          ASSERT_FALSE(stacks[which].empty());
          EXPECT_EQ(one.labels[t + 1], stacks[which].back());
          stacks[which].pop_back(), --held;
        }
      }
      for (size_t t = one.tokens.size() / 3 * 3; t < one.tokens.size(); ++t) EXPECT_GE(one.tokens[t], 93);
      labels += static_cast<double>(labels_of(one));
    }
    EXPECT_NEAR(labels / kCount, published[i], 0.02 * published[i] + 0.5) << task->length();
    EXPECT_NEAR(static_cast<double>(pushes) / static_cast<double>(choices), 0.6,
                4 * std::sqrt(0.24 / static_cast<double>(choices)));
  }
}

TEST(Synthetic, AccuracyByHand) {
  const int32_t n = kNoLabel;
  const std::vector<int32_t> labels{n, 3, 4, n, n, 7, n, n, n, n, n, n},
      predictions{1, 3, 5, 5, 7, 7, 0, 0, 1, 2, 3, 4};
  const TaskAccuracy accuracy = task_accuracy(predictions, labels, 4);
  EXPECT_EQ(accuracy.labels, 3);
  EXPECT_EQ(accuracy.correct, 2);
  EXPECT_DOUBLE_EQ(accuracy.micro, 2.0 / 3);
  EXPECT_DOUBLE_EQ(accuracy.macro, (0.5 + 1) / 2);
  EXPECT_EQ(task_accuracy({}, {}, 4).labels, 0);
}

TEST(Synthetic, WhatCannotBeDrawnIsSaid) {
  EXPECT_THAT(error_of([] { make_task("mqarr", {}); }), HasSubstr("got 'mqarr'; did you mean 'mqar'?"));
  EXPECT_THAT(error_of([] { make_task("mqar", {.length = 66}); }),
              HasSubstr("length: expected at least 2 pairs + 3 = 67 for 32 pairs, got 66"));
  EXPECT_THAT(error_of([] { make_task("mqar", {.vocab_size = 7}); }), HasSubstr("vocab_size: expected an even number"));
  EXPECT_THAT(error_of([] { make_task("mqar", {.pairs = -1}); }), HasSubstr("pairs: expected 1 to"));
  EXPECT_THAT(error_of([] { make_task("mqar_zoology", {.length = 64, .pairs = 17}); }),
              HasSubstr("at least 2 pairs (passes + 1) = 68, got 64"));
  EXPECT_THAT(error_of([] { make_task("mqar_zoology", {.power = -1}); }), HasSubstr("power: expected"));
  EXPECT_THAT(error_of([] { make_task("stack", {.length = -3}); }), HasSubstr("length: expected 1 to"));
  EXPECT_THAT(error_of([] { last_write_ceiling(*make_task("stack", {}), 1, 1); }), HasSubstr("a task that is none"));
  EXPECT_EQ(make_task("stack", {.length = 1})->example(1, 1).tokens.size(), 1u);
}

}  // namespace
}  // namespace fw
