#include "generate/prompt_lookup.h"

#include <gtest/gtest.h>

namespace fw {
namespace {

using Ids = std::vector<int32_t>;

PromptLookup of(const Ids& text) {
  PromptLookup lookup;
  lookup.add(text);
  return lookup;
}

TEST(PromptLookup, WithoutTheLastTwoBeforeThereIsNone) {
  EXPECT_EQ(PromptLookup().draft(3, 4), Ids{});
  EXPECT_EQ(of({7}).draft(3, 4), Ids{});
  EXPECT_EQ(of({1, 2, 3, 4}).draft(5, 4), Ids{});
  EXPECT_EQ(of({1, 2, 3, 1}).draft(3, 4), Ids{}) << "1 3 never came";
}

TEST(PromptLookup, WhatFollowedTheLastTwo) {
  EXPECT_EQ(of({1, 2, 3, 4, 5, 6, 9, 1}).draft(2, 3), (Ids{3, 4, 5}));
  EXPECT_EQ(of({1, 2, 3, 9, 1, 2, 4, 9, 8, 1}).draft(2, 2), (Ids{4, 9})) << "the last place of two";
}

// The last three before the last two, also where that place is older.
TEST(PromptLookup, ThreeGoBeforeTwo) {
  EXPECT_EQ(of({5, 1, 2, 3, 6, 1, 2, 4, 5, 1}).draft(2, 1), Ids{3});
  EXPECT_EQ(of({6, 1, 2, 3, 6, 1, 2, 4, 6, 1}).draft(2, 1), Ids{4}) << "the last of two such places";
  EXPECT_EQ(of({1, 2, 3, 9, 1}).draft(2, 1), Ids{3}) << "a place with nothing in front";
}

TEST(PromptLookup, ATextThatRepeatsGoesOn) {
  EXPECT_EQ(of({1, 2, 3, 1, 2}).draft(3, 7), (Ids{1, 2, 3, 1, 2, 3, 1}));
  EXPECT_EQ(of({4, 4}).draft(4, 3), (Ids{4, 4, 4}));
}

TEST(PromptLookup, TokensComeInAnyPieces) {
  PromptLookup lookup;
  for (const int32_t id : {1, 2, 3, 4, 1}) lookup.add({&id, 1});
  EXPECT_EQ(lookup.draft(2, 2), (Ids{3, 4}));
  EXPECT_EQ(lookup.text(), (Ids{1, 2, 3, 4, 1}));
}

// A pair that came more often than occurrences are looked at.
TEST(PromptLookup, OfManyOccurrencesTheLastOnesAreLookedAt) {
  Ids text{9, 1, 2, 5};
  for (int32_t i = 0; i < 100; ++i) text.insert(text.end(), {20 + i, 1, 2, 200 + i});
  text.insert(text.end(), {9, 1});
  EXPECT_EQ(of(text).draft(2, 1), Ids{299});
  text.back() = 20 + 60, text.push_back(1);
  EXPECT_EQ(of(text).draft(2, 1), Ids{260});
}

}  // namespace
}  // namespace fw
