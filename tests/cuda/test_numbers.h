// For tests of kernels that stand alone: bf16 by rounding to nearest even, a generator of the tests' own, and which of its cases a program runs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace fw::cuda::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline uint16_t to_bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline double from_bf16(uint16_t x) {
  const uint32_t u = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Uniform in [-scale, scale).
struct Random {
  uint64_t state;
  double operator()(double scale) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<double>(state >> 40) / (1 << 24) - 0.5) * 2 * scale;
  }
};

// FW_CASES=i/n in the environment: part i of n of a program's cases, in no order that lists of cases could have too. Not set, or nothing of that form: all.
inline bool chosen(uint64_t number) {
  const char* text = std::getenv("FW_CASES");
  unsigned part = 0, parts = 1;
  if (text == nullptr || std::sscanf(text, "%u/%u", &part, &parts) != 2 || parts == 0) return true;
  return (number * 0x9e3779b97f4a7c15u >> 40) % parts == part % parts;
}

}  // namespace fw::cuda::testing
