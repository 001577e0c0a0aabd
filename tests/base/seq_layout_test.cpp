#include "base/seq_layout.h"

#include <gtest/gtest.h>

#include "base/base_support.h"

namespace fw {
namespace {

using testing::fails;

TEST(SeqLayout, Offsets) {
  const SeqLayout layout({0, 3, 3, 10});
  EXPECT_EQ(layout.count(), 3);
  EXPECT_EQ(layout.tokens(), 10);
  EXPECT_EQ(layout.begin(2), 3);
  EXPECT_EQ(layout.end(0), 3);
  EXPECT_EQ(layout.length(1), 0);
  EXPECT_EQ(layout.length(2), 7);
}

TEST(SeqLayout, EmptyAndUniform) {
  EXPECT_EQ(SeqLayout().count(), 0);
  EXPECT_EQ(SeqLayout().tokens(), 0);
  EXPECT_EQ(SeqLayout::uniform(3, 4).offsets(), (std::vector<int64_t>{0, 4, 8, 12}));
  EXPECT_EQ(SeqLayout::uniform(0, 4).tokens(), 0);
}

TEST(SeqLayout, WhatCannotBe) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"begin with 0"}, [] { SeqLayout{std::vector<int64_t>{}}; }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"begin with 0", "got 1"}, [] { SeqLayout({1, 2}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"do not decrease", "got 4 after 5 at index 2"}, [] { SeqLayout({0, 5, 4}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"do not decrease"}, [] { SeqLayout({0, -1}); }));
}

}  // namespace
}  // namespace fw
