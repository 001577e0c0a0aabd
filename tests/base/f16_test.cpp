#include "base/f16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace fw {
namespace {

// The value of a float16 number by its definition.
double value_of(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 0    ? std::ldexp(mantissa, -24)
                      : exponent != 31 ? std::ldexp(1024 + mantissa, exponent - 25)
                      : mantissa == 0  ? std::numeric_limits<double>::infinity()
                                       : std::nan("");
  return (bits & 0x8000) != 0 ? -size : size;
}

float widened(uint16_t bits) {
  const F16 x{bits};
  float y = 0;
  widen_f16(1, &x, &y);
  return y;
}
uint16_t rounded(float x) {
  F16 y{0xABCD};
  round_to_f16(1, &x, &y);
  return y.bits;
}

TEST(Float16Numbers, EveryNumberHasItsValueAndComesBack) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const uint16_t x = static_cast<uint16_t>(bits);
    const double expected = value_of(x);
    const float got = widened(x);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_TRUE(std::isnan(value_of(rounded(got)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), expected) << bits;
    ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    ASSERT_EQ(rounded(got), x) << bits;
  }
}

// Between neighbours: to the nearer, half way to the even one, and from half way above the largest on to infinity.
TEST(Float16Numbers, RoundToNearestEven) {
  for (unsigned bits = 0; bits < 0x7C00; ++bits) {
    const uint16_t below = static_cast<uint16_t>(bits), above = static_cast<uint16_t>(bits + 1);
    const float low = widened(below), high = above == 0x7C00 ? 65536.0F : widened(above),
                middle = low + (high - low) / 2;
    ASSERT_EQ(rounded(middle), bits % 2 == 0 ? below : above) << bits;
    ASSERT_EQ(rounded(std::nextafter(middle, low)), below) << bits;
    ASSERT_EQ(rounded(std::nextafter(middle, high)), above) << bits;
    ASSERT_EQ(rounded(-middle), (bits % 2 == 0 ? below : above) | 0x8000) << bits;
  }
  EXPECT_EQ(rounded(65504.0F), 0x7BFF);
  EXPECT_EQ(rounded(65519.99F), 0x7BFF);
  EXPECT_EQ(rounded(65520.0F), 0x7C00);
  EXPECT_EQ(rounded(-1e30F), 0xFC00);
  EXPECT_EQ(rounded(std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_EQ(rounded(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(rounded(0x1p-25F), 0);  // half way to the smallest
  EXPECT_EQ(rounded(0x1.002p-25F), 1);
}

// Every length from none to some vectors; nothing after the end is written.
TEST(Float16Numbers, OfEveryLength) {
  for (size_t n = 0; n <= 70; ++n) {
    std::vector<float> x(n), wide(n + 1, 7.0F);
    std::vector<F16> y(n + 1, F16{0xABCD});
    for (size_t i = 0; i < n; ++i)
      x[i] = std::ldexp(1.0F + 1e-3F * static_cast<float>(i * 7919 % 1000), static_cast<int>(i % 50) - 30);
    round_to_f16(static_cast<int64_t>(n), x.data(), y.data());
    widen_f16(static_cast<int64_t>(n), y.data(), wide.data());
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(y[i].bits, rounded(x[i]));
      EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(widened(y[i].bits)));
    }
    EXPECT_EQ(y.back().bits, 0xABCD);
    EXPECT_EQ(wide.back(), 7.0F);
  }
}

}  // namespace
}  // namespace fw
