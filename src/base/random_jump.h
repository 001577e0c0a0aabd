// RandomJump: takes a Random 2^k numbers further at once, to the state that drawing them would have left. So the
// numbers of a long draw can be made in pieces, by several threads, and are those of one thread.
//
// The generator (mt19937_64) is linear over GF(2): its words w_0, w_1, ... obey sum_i p_i w_{i+j} = 0 for one
// polynomial p of degree 19937. With g(x) = x^(n-1) mod p the words n further on are w_{n+j} = sum_i g_i w_{i+1+j},
// some ten thousand exclusive ors of blocks. p is found once, from the words themselves (Berlekamp-Massey), which takes
// some 0.1 s; g is n's by repeated squaring.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "base/random.h"

namespace fw {

class RandomJump {
 public:
  explicit RandomJump(int log_draws);  // 2^log_draws numbers, 0 <= log_draws < 62
  void apply(Random& random) const;
  int64_t draws() const { return int64_t{1} << log_draws_; }

 private:
  int log_draws_;
  std::vector<uint64_t> power_;  // g, bit i of word i / 64 is g_i
};

// The generator's words of which its next kRandomWords numbers are made, before they are tempered: those and the
// recurrence give all that follow.
inline constexpr size_t kRandomWords = std::mt19937_64::state_size;
std::array<uint64_t, kRandomWords> next_words(const Random& random);

}  // namespace fw
