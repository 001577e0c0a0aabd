#include "base/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/base_support.h"
#include "base/normal_transform.h"

namespace fw {
namespace {

using testing::fails;

TEST(Random, TheSequenceOfTheStandard) {
  // [rand.predef]: the 10000th value of a default-constructed mt19937_64, whose seed is 5489.
  Random random(5489);
  for (int i = 1; i < 10000; ++i) random.bits();
  EXPECT_EQ(random.bits(), 9981545732273789042u);
}

TEST(Random, UniformIsInsideItsRangeWithTheRightMoments) {
  Random random(1);
  double sum = 0, squares = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = random.uniform(-2, 4);
    ASSERT_GE(x, -2);
    ASSERT_LT(x, 4);
    sum += x;
    squares += x * x;
  }
  // Five deviations of the means: sqrt(3 / n) and sqrt(Var(x^2) / n).
  EXPECT_NEAR(sum / kCount, 1, 5 * std::sqrt(3.0 / kCount));
  EXPECT_NEAR(squares / kCount, 4, 5 * std::sqrt(19.2 / kCount));
}

TEST(Random, NormalHasTheRightMoments) {
  Random random(2);
  std::array<double, 4> moment = {};
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = random.normal();
    ASSERT_TRUE(std::isfinite(x));
    for (int k = 0; k < 4; ++k) moment[static_cast<size_t>(k)] += std::pow(x, k + 1) / kCount;
  }
  EXPECT_NEAR(moment[0], 0, 5 * std::sqrt(1.0 / kCount));
  EXPECT_NEAR(moment[1], 1, 5 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(moment[2], 0, 5 * std::sqrt(15.0 / kCount));
  EXPECT_NEAR(moment[3], 3, 5 * std::sqrt(96.0 / kCount));
}

// Of numbers that the transform treats apart: the least and the largest share, powers of two, eighths of a turn and
// their neighbours.
TEST(Random, NormalIsTheTransformOfBoxAndMuller) {
  Random random(8);
  std::vector<uint64_t> bits{0, ~uint64_t{0}, uint64_t{1} << 11, ~uint64_t{0} - (uint64_t{1} << 11)};
  for (uint64_t eighth = 0; eighth < 8; ++eighth) {
    for (const uint64_t off : {uint64_t{0}, uint64_t{1} << 11, ~uint64_t{0} << 11})
      bits.push_back((eighth << 61) + off);
  }
  for (int i = 0; i < 20000; ++i) bits.push_back(random.bits() >> (i % 40));
  for (size_t i = 0; i < bits.size(); ++i) {
    const uint64_t first = bits[i], second = bits[(i * 7 + 3) % bits.size()];
    const long double share = static_cast<long double>((uint64_t{1} << 53) - (first >> 11)) * 0x1p-53L,
                      turn = static_cast<long double>(second >> 11) * 0x1p-53L;
    const long double expected = std::sqrt(-2 * std::log(share)) * std::cos(6.283185307179586476925286766559L * turn);
    const double got = normal_of(first, second);
    EXPECT_NEAR(got, static_cast<double>(expected), 1e-15 * std::max(1.0, std::abs(got))) << first << " " << second;
  }
}

TEST(Random, BelowIsUnbiased) {
  Random random(3);
  std::array<int, 7> seen = {};
  constexpr int kCount = 140000;
  for (int i = 0; i < kCount; ++i) ++seen[random.below(7)];
  for (const int n : seen) EXPECT_NEAR(n, 20000, 5 * std::sqrt(20000 * 6.0 / 7));
  EXPECT_EQ(random.below(1), 0u);
  // Just above half the range: a plain remainder would give the low half twice as often.
  const uint64_t n = (uint64_t{1} << 63) + 1;
  int low = 0;
  for (int i = 0; i < 10000; ++i) low += random.below(n) < n / 2;
  EXPECT_NEAR(low, 5000, 5 * 50);
}

TEST(Random, AStateSavedAndLoadedGoesOnTheSame) {
  Random random(4);
  for (int i = 0; i < 1000; ++i) random.normal();
  const std::string state = random.save();
  Random other(99);
  other.load(state);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(random.bits(), other.bits());
}

TEST(Random, ATextThatIsNoStateChangesNothing) {
  Random random(5), same(5);
  const std::string state = random.save();
  for (const std::string& text :
       {std::string(), std::string("seven"), state.substr(0, state.size() / 2), std::string("1 2 3")}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"random generator state"}, [&] { random.load(text); }));
  }
  EXPECT_EQ(random.bits(), same.bits());
}

}  // namespace
}  // namespace fw
