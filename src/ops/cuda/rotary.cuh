// Angles of rotary position embedding. A position times a frequency needs more digits than a float has. So what a
// channel turns by from one position to the next is a share of a whole turn in 2^-64ths. A position times that, in 64
// bits, loses the whole turns at the top and keeps the fraction at any position.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gpu/ptx.cuh"
#include "rule/token_scalars.h"

namespace fw::cuda {

// Of channel c of the first half of `rotated`: theta^(-2c / rotated) radians a position. log2_step: log2 of the ratio
// of neighbouring channels' frequencies.
FW_HOST_DEVICE inline uint64_t rotary_share(double log2_step, int c) {
  constexpr double kInverseRotation = 0.15915494309189535;  // 1 / (2 pi)
  const double rotation = std::exp2(log2_step * c) * kInverseRotation;
  return static_cast<uint64_t>((rotation - std::floor(rotation)) * 0x1p64);
}
inline double rotary_log2_step(double theta, int64_t rotated) {
  return -2.0 * std::log2(theta) / static_cast<double>(rotated);
}

// From -pi to pi.
FW_DEVICE float rotary_angle(uint64_t share, int64_t position) {
  // pi / 2^31
  return static_cast<float>(static_cast<int32_t>(share * static_cast<uint64_t>(position) >> 32)) *
         1.4629180792671596e-9f;
}

// Shares of all channels of heads of up to 128, an argument of a kernel.
inline constexpr int kMostTurns = 64;
struct RotaryShares {
  uint64_t of[kMostTurns] = {};
  RotaryShares(double theta, int64_t rotated) {  // theta 0: nothing turns
    if (theta == 0) return;
    for (int c = 0; c < std::min<int64_t>(rotated / 2, kMostTurns); ++c)
      of[c] = rotary_share(rotary_log2_step(theta, rotated), c);
  }
};

// (x, y) by an angle.
FW_DEVICE void rotate_pair(float& x, float& y, float cosine, float sine) {
  const float before = x;
  x = before * cosine - y * sine;
  y = before * sine + y * cosine;
}

}  // namespace fw::cuda
