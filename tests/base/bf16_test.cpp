#include "base/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace fw {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float value_of(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounding to nearest, ties to even, by its definition: the nearer of the two neighbours.
Bf16 nearest(float x) {
  if (std::isnan(x)) return {static_cast<uint16_t>((bits_of(x) >> 16) | 0x40)};
  const Bf16 below = {static_cast<uint16_t>(bits_of(x) >> 16)};  // towards zero
  const Bf16 above = {static_cast<uint16_t>(below.bits + 1)};
  if (std::isinf(x)) return below;
  // One unit above the largest number stands for 2^128 here, as in the rule for rounding to infinity.
  const double up = std::isinf(value_of(above)) ? std::copysign(std::ldexp(1.0, 128), static_cast<double>(x))
                                                : static_cast<double>(value_of(above));
  const double to_below = std::abs(static_cast<double>(x) - static_cast<double>(value_of(below))),
               to_above = std::abs(up - static_cast<double>(x));
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below.bits % 2 == 0 ? below : above;
}

std::vector<float> numbers(int64_t n) {
  std::vector<float> list = {0.0F,
                             -0.0F,
                             1.0F,
                             1.00390625F,
                             1.01171875F,
                             -3.14159F,
                             1e-40F,
                             3.4e38F,
                             std::numeric_limits<float>::max(),
                             std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::signaling_NaN(),
                             std::numeric_limits<float>::denorm_min()};
  for (int64_t i = static_cast<int64_t>(list.size()); i < n; ++i)
    list.push_back(std::ldexp(1.0F + 1e-3F * static_cast<float>(i * 7919 % 1000), static_cast<int>(i % 60) - 30));
  list.resize(static_cast<size_t>(n));
  return list;
}

// Every length from none to some vectors; nothing after the end is written.
TEST(Bf16Numbers, RoundToNearestEvenAndBack) {
  for (int64_t n = 0; n <= 70; ++n) {
    const std::vector<float> x = numbers(n);
    std::vector<Bf16> rounded(static_cast<size_t>(n) + 1, Bf16{0xABCD});
    std::vector<float> values(static_cast<size_t>(n) + 1, 7.0F), wide(static_cast<size_t>(n) + 1, 7.0F);
    round_to_bf16(n, x.data(), rounded.data());
    round_to_bf16_values(n, x.data(), values.data());
    widen_bf16(n, rounded.data(), wide.data());
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(rounded[i].bits, nearest(x[i]).bits) << x[i] << " at " << i << " of " << n;
      EXPECT_EQ(bits_of(wide[i]), static_cast<uint32_t>(rounded[i].bits) << 16);
      EXPECT_EQ(bits_of(values[i]), bits_of(wide[i]));
    }
    EXPECT_EQ(rounded.back().bits, 0xABCD);
    EXPECT_EQ(values.back(), 7.0F);
    EXPECT_EQ(wide.back(), 7.0F);
  }
}

TEST(Bf16Numbers, ValuesMayBeRoundedInPlace) {
  std::vector<float> x = numbers(37), y(37);
  round_to_bf16_values(37, x.data(), y.data());
  round_to_bf16_values(37, x.data(), x.data());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(bits_of(x[i]), bits_of(y[i])) << i;
}

}  // namespace
}  // namespace fw
