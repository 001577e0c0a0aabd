#include "base/checksum.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fw {
namespace {

uint64_t sum_of(std::string_view text) {
  Checksum sum;
  sum.add(text);
  return sum.value();
}

std::string sample(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * i * 37 + i);
  return text;
}

TEST(Checksum, ValueIsPinned) {
  // Files on disk hold these values: they may never change.
  EXPECT_EQ(sum_of(""), 0xaf63bd4c29620a93u);
  EXPECT_EQ(sum_of("fastweight"), 0xa96454f772cf8619u);
}

TEST(Checksum, PiecesDoNotMatter) {
  const std::string text = sample(100);
  for (size_t a = 0; a <= text.size(); ++a) {
    for (size_t b = a; b <= text.size(); b += 3) {
      Checksum sum;
      sum.add(std::string_view(text).substr(0, a));
      sum.add(std::string_view(text).substr(a, b - a));
      sum.add(std::string_view(text).substr(b));
      ASSERT_EQ(sum.value(), sum_of(text)) << a << " " << b;
    }
  }
}

TEST(Checksum, EveryFlippedBitAndEveryPrefixDiffers) {
  std::string text = sample(75);
  std::set<uint64_t> seen = {sum_of(text)};
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
    EXPECT_TRUE(seen.insert(sum_of(text)).second) << bit;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
  }
  const std::string zeros(40, '\0');
  for (size_t n = 0; n <= zeros.size(); ++n) EXPECT_TRUE(seen.insert(sum_of(zeros.substr(0, n))).second) << n;
}

TEST(Checksum, HighBitsOfTwoWordsDoNotCancel) {
  // In plain FNV-1a over words the top bit never leaves its place, so two flips would go unseen.
  std::string text = sample(32);
  const uint64_t before = sum_of(text);
  text[7] = static_cast<char>(text[7] ^ 0x80);
  text[15] = static_cast<char>(text[15] ^ 0x80);
  EXPECT_NE(sum_of(text), before);
}

}  // namespace
}  // namespace fw
