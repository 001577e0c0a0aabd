// Numbers for tests of kernels that stand alone: bf16 by rounding to nearest even, and a generator of the tests' own;
// and which cases a run takes.
#pragma once

#include <cstdint>
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

// Whether a run takes a list's case: all, or those of FW_TEST_SHARE ("0/3": every third from the first on). The
// emulation's other orders share a list's cases (tests/cuda/emulated): each case is run in one of them.
inline bool in_share(uint64_t index) {
  const char* const share = std::getenv("FW_TEST_SHARE");
  if (!share) return true;
  char* end = nullptr;
  const uint64_t part = std::strtoull(share, &end, 10), parts = *end == '/' ? std::strtoull(end + 1, nullptr, 10) : 1;
  return index % (parts ? parts : 1) == part;
}

}  // namespace fw::cuda::testing
