// Floats split in two, and the random numbers and the rounding of moments in bf16.
#include "ops/split_value.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "base/random.h"
#include "ops/stochastic_rounding.h"

namespace fw::testing {
namespace {

float value(uint32_t bits) { return std::bit_cast<float>(bits); }
float upper(uint16_t bits) { return value(static_cast<uint32_t>(bits) << 16); }

// Bits that meet every case of carry and sign: all lower halves under some upper ones, all upper ones over some lower
// halves.
std::vector<uint32_t> patterns() {
  std::vector<uint32_t> list;
  for (const uint32_t high :
       {0x0000u, 0x8000u, 0x0001u, 0x007fu, 0x0080u, 0x3f80u, 0x3f81u, 0xbf80u, 0xbf81u, 0x7f7fu, 0xff7fu}) {
    for (uint32_t low = 0; low < 0x10000u; ++low) list.push_back(high << 16 | low);
  }
  for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    for (uint32_t high = 0; high < 0x10000u; ++high) list.push_back(high << 16 | low);
  }
  return list;
}

TEST(SplitValue, ItsPartsAreTheFloatToTheBit) {
  for (const uint32_t bits : patterns()) {
    const uint32_t joined = join_value(split_value(bits));
    if (std::isnan(value(bits))) {
      ASSERT_TRUE(std::isnan(value(joined))) << bits;
      ASSERT_TRUE(std::isnan(upper(split_value(bits).rounded))) << bits;
    } else {
      ASSERT_EQ(joined, bits);
    }
  }
}

TEST(SplitValue, TheUpperHalfIsTheNearestBf16AndOfTwoTheOneAwayFromZero) {
  int ties = 0;
  for (const uint32_t bits : patterns()) {
    if (std::isnan(value(bits)) || std::isinf(value(bits))) continue;
    // In units of the lower half's last bit, of magnitudes.
    const int64_t magnitude = bits & 0x7fffffffu, got = int64_t{split_value(bits).rounded & 0x7fffu} << 16;
    const int64_t below = magnitude / 0x10000 * 0x10000, from_below = magnitude - below;
    ASSERT_EQ(got, from_below < 0x8000 ? below : below + 0x10000) << bits;
    ASSERT_EQ(split_value(bits).rounded >> 15, bits >> 31) << bits;
    ties += from_below == 0x8000 ? 1 : 0;
  }
  EXPECT_GT(ties, 60000);
}

// Of Random123's known answers (kat_vectors, philox4x32 with 10 rounds).
TEST(RandomWords, ArePhilox) {
  const auto words = [](uint64_t index, uint64_t update, uint64_t key) {
    const RandomWords w = random_words(index, update, key);
    return std::vector<uint32_t>(w.x, w.x + 4);
  };
  EXPECT_EQ(words(0, 0, 0), (std::vector<uint32_t>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(words(~0ull, ~0ull, ~0ull), (std::vector<uint32_t>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(words(0x85a308d3243f6a88ull, 0x0370734413198a2eull, 0x299f31d0a4093822ull),
            (std::vector<uint32_t>{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(StochasticRounding, TakesNeighboursSuchThatTheMeanIsExact) {
  Random random(1);
  for (int i = 0; i < 20; ++i) {
    const auto x = static_cast<float>(random.normal());
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const auto below = static_cast<uint16_t>(bits >> 16), above = static_cast<uint16_t>(below + 1);
    constexpr int kTimes = 20000;
    int ups = 0;
    for (int t = 0; t < kTimes; ++t) {
      const uint16_t got =
          round_stochastically(bits, random_words(7, static_cast<uint64_t>(t), 3).x[i % 4] >> (i % 2 * 16));
      ASSERT_TRUE(got == below || got == above);
      ups += got == above ? 1 : 0;
    }
    // Five standard deviations of a coin's mean.
    EXPECT_NEAR(static_cast<double>(ups) / kTimes, (bits & 0xffffu) / 65536.0, 5 * 0.5 / std::sqrt(kTimes)) << x;
  }
}

TEST(StochasticRounding, LeavesWhatIsABf16AndWhatIsNotFinite) {
  for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
    for (uint32_t high = 0; high < 0x10000u; ++high) {
      const uint16_t got = round_stochastically(high << 16, random);
      if (std::isnan(upper(static_cast<uint16_t>(high)))) {
        ASSERT_TRUE(std::isnan(upper(got)));
      } else {
        ASSERT_EQ(got, high);
      }
    }
    for (const uint32_t nan : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xff80ffffu})
      EXPECT_TRUE(std::isnan(upper(round_stochastically(nan, random))));
  }
}

// Rounded to the nearest, a mean that changes by a quarter of a unit a step never changes; so it does on average.
TEST(StochasticRounding, SmallChangesAddUp) {
  uint32_t bits = std::bit_cast<uint32_t>(1.0F);
  for (uint64_t step = 0; step < 4096; ++step) {
    const float next = value(bits) + 0.0625F / 128.0F;  // a sixteenth of a unit
    bits = static_cast<uint32_t>(round_stochastically(std::bit_cast<uint32_t>(next), random_words(0, step, 1).x[0]))
           << 16;
  }
  EXPECT_NEAR(value(bits), 3.0F, 0.5F);
}

}  // namespace
}  // namespace fw::testing
