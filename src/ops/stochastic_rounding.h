// Rounding to bf16 up or down at random, such that the mean is exact. Moments that change by less than half a unit a
// step need it in order to change at all (Gupta et al. 2015, arXiv:1502.02551). The random numbers are a function of a
// counter, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no state, the same on
// every device and for any cut of the work, and a resumed run has those of the undisturbed one.
#pragma once

#include <cstdint>

#include "rule/token_scalars.h"

namespace fw {

struct RandomWords {
  uint32_t x[4];
};

// Words of the counter (index, update) under the key.
FW_HOST_DEVICE inline RandomWords random_words(uint64_t index, uint64_t update, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32),
           c2 = static_cast<uint32_t>(update), c3 = static_cast<uint32_t>(update >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The bf16 below or above a float's bits (in magnitude), the one above with the probability of what is left over;
// random: 16 bits. What is a bf16 stays as it is, and so do infinities; a NaN stays one.
FW_HOST_DEVICE inline uint16_t round_stochastically(uint32_t bits, uint32_t random) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16);
}

}  // namespace fw
