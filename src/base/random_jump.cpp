#include "base/random_jump.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace fw {
namespace {

constexpr size_t kWords = kRandomWords, kMiddle = 156;
constexpr size_t kDegree = 19937;
constexpr int64_t kShort = 1024;  // as many numbers are drawn

// The generator's own words, of which those from `next` on are still to be given out.
struct State {
  std::array<uint64_t, kWords> words;
  size_t next;
};

// The library writes the words and then how many of them are spent.
State state_of(const Random& random) {
  std::istringstream in(random.save());
  State state;
  for (uint64_t& word : state.words) in >> word;
  in >> state.next;
  if (in.fail()) fail_internal("random generator state: expected {} words and a place, got other text", kWords);
  return state;
}

void set_state(Random& random, const State& state) {
  std::ostringstream out;
  for (const uint64_t word : state.words) out << word << ' ';
  out << state.next;
  random.load(out.str());
}
constexpr size_t kLong = kDegree / 64 + 1;  // words of a polynomial of that degree
using Polynomial = std::vector<uint64_t>;

bool bit(const Polynomial& p, size_t i) { return (p[i / 64] >> (i % 64) & 1) != 0; }

// The words that follow state [kWords], which are what the generator puts in the place of these, before it tempers
// them.
std::vector<uint64_t> words_after(const State& state, size_t count) {
  constexpr uint64_t kLower = (uint64_t{1} << 31) - 1, kTwist = 0xB5026F5AA96619E9;
  std::vector<uint64_t> words(state.words.begin(), state.words.end());
  words.reserve(kWords + count);
  for (size_t k = 0; k < count; ++k) {
    const uint64_t y = (words[k] & ~kLower) | (words[k + 1] & kLower);
    words.push_back(words[k + kMiddle] ^ (y >> 1) ^ ((y & 1) != 0 ? kTwist : 0));
  }
  return words;
}

// One place up.
void times_x(Polynomial& p) {
  for (size_t i = p.size(); i-- > 1;) p[i] = p[i] << 1 | p[i - 1] >> 63;
  p[0] <<= 1;
}

void add(Polynomial& to, const Polynomial& p) {
  for (size_t i = 0; i < p.size(); ++i) to[i] ^= p[i];
}

// p, of the shortest recurrence of the words' last bits: Berlekamp and Massey's algorithm.
Polynomial find_characteristic() {
  constexpr size_t kBits = 2 * kDegree + 64;
  const std::vector<uint64_t> words = words_after(state_of(Random(1)), kBits);
  Polynomial connection(kLong), before(kLong), seen(kLong);  // seen: bit i is the sequence's i places back
  connection[0] = 1;
  before[0] = 1;
  size_t length = 0;
  for (size_t n = 0; n < kBits; ++n) {
    times_x(before);
    times_x(seen);
    seen[0] |= words[kWords + n] & 1;
    uint64_t parity = 0;
    for (size_t i = 0; i < kLong; ++i) parity ^= connection[i] & seen[i];
    if (std::popcount(parity) % 2 == 0) continue;
    if (2 * length > n) {
      add(connection, before);
      continue;
    }
    Polynomial old = connection;
    add(connection, before);
    before = std::move(old);
    length = n + 1 - length;
  }
  if (length != kDegree) fail_internal("random numbers: expected a recurrence of length {}, found {}", kDegree, length);
  Polynomial p(kLong);  // the connection's coefficients count backwards
  for (size_t i = 0; i <= kDegree; ++i) {
    if (bit(connection, kDegree - i)) p[i / 64] |= uint64_t{1} << (i % 64);
  }
  return p;
}

const Polynomial& characteristic() {
  static const Polynomial p = find_characteristic();
  return p;
}

uint64_t spread(uint32_t half) {
  uint64_t x = half;
  x = (x | x << 16) & 0x0000FFFF0000FFFF;
  x = (x | x << 8) & 0x00FF00FF00FF00FF;
  x = (x | x << 4) & 0x0F0F0F0F0F0F0F0F;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

// g^2 mod p: over GF(2) a square has the same coefficients at twice the places. shifted[s] = p x^s.
Polynomial square(const Polynomial& g, const std::array<Polynomial, 64>& shifted) {
  Polynomial wide(2 * kLong + 1);
  for (size_t i = 0; i < kLong; ++i) {
    wide[2 * i] = spread(static_cast<uint32_t>(g[i]));
    wide[2 * i + 1] = spread(static_cast<uint32_t>(g[i] >> 32));
  }
  for (size_t at = 2 * kDegree; at >= kDegree; --at) {
    if (!bit(wide, at)) continue;
    const size_t up = at - kDegree;
    const Polynomial& p = shifted[up % 64];
    for (size_t i = 0; i < p.size(); ++i) wide[up / 64 + i] ^= p[i];
  }
  wide.resize(kLong);
  return wide;
}

}  // namespace

RandomJump::RandomJump(int log_draws) : log_draws_(log_draws), power_(kLong) {
  std::array<Polynomial, 64> shifted;
  shifted[0] = characteristic();
  shifted[0].push_back(0);
  for (size_t s = 1; s < shifted.size(); ++s) {
    shifted[s] = shifted[s - 1];
    times_x(shifted[s]);
  }
  // x^(n - kWords - 1), by the exponent's bits.
  power_[0] = 1;
  if (draws() < kShort) return;
  const auto exponent = static_cast<uint64_t>(draws()) - kWords - 1;
  for (int i = std::bit_width(exponent); i-- > 0;) {
    power_ = square(power_, shifted);
    if ((exponent >> i & 1) == 0) continue;
    times_x(power_);
    if (!bit(power_, kDegree)) continue;
    for (size_t j = 0; j < kLong; ++j) power_[j] ^= shifted[0][j];
  }
}

std::array<uint64_t, kRandomWords> next_words(const Random& random) {
  const State state = state_of(random);
  const std::vector<uint64_t> words = words_after(state, state.next);
  std::array<uint64_t, kRandomWords> next;
  std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(state.next), kRandomWords, next.begin());
  return next;
}

void RandomJump::apply(Random& random) const {
  if (draws() < kShort) {
    for (int64_t i = 0; i < draws(); ++i) random.bits();
    return;
  }
  State state = state_of(random);
  // From the second word on, as the first one's lower 31 bits are no part of the linear state.
  const std::vector<uint64_t> words = words_after(state, kDegree + 1);
  State far = {{}, 0};  // n - kWords further on
  for (size_t i = 0; i < kDegree; ++i) {
    if (!bit(power_, i)) continue;
    for (size_t j = 0; j < kWords; ++j) far.words[j] ^= words[i + 1 + j];
  }
  // The library has its words in blocks that begin at multiples of kWords, of which `next` are spent: so shall it be
  // here.
  far.next = (state.next + static_cast<size_t>(draws())) % kWords;
  if (far.next == 0) far.next = kWords;
  const size_t forward = kWords + state.next - far.next;
  const std::vector<uint64_t> block = words_after(far, forward);
  std::copy_n(block.begin() + static_cast<std::ptrdiff_t>(forward), kWords, far.words.begin());
  set_state(random, far);
}

}  // namespace fw
