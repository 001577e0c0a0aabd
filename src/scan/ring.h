// Where the tokens of a ring lie and when they are folded into the state (fw_ring of the C header), for host and
// device. Both follow from a sequence's positions alone. recurrence.md section 1 has Sbar, w and u.
//
// With S the state in memory, P_j = a_{j+1} .. a_t the decays from ring token j to token t, and P_0 = a_1 .. a_t:
//     Sbar^T e = S^T (P_0 e) + sum over j of ((P_j w_j) . e) u_j,   the same of r
//     after L tokens, with t the last one: S = P_0 S + sum over j of (P_j w_j) u_j^T
// Decays are multiplied from the newest token to the oldest, on CUDA those of four tokens first. Products of factors of
// at most 1 take decays of 0 too, where quotients of cumulated ones would not.
#pragma once

#include <cstdint>

#include "rule/token_scalars.h"

namespace fw {

inline constexpr int kMostRingTokens = 64;

// A sequence in a call. Tokens are numbered by their position. A token's sums begin at the last multiple of `tokens`:
// the state that it reads has been folded up to there. What may be taken back is folded for the call's later tokens
// alone, and the state in memory stays.
struct RingSpan {
  int tokens = 1;    // from fold to fold
  int base = 0;      // the tokens before it are in the state in memory
  int position = 0;  // of the call's first token
  int stored = 0;    // the same of base after the call
  int last = 0;      // where the call's last fold ends, stored or not; base: there is none

  // The last multiple of `tokens` up to `at`, which is not before base; near base without a division.
  FW_HOST_DEVICE int begin(int at) const {
    const int past = at - base;
    return past < tokens ? base : past < 2 * tokens ? base + tokens : at / tokens * tokens;
  }
  FW_HOST_DEVICE bool folds() const { return last > base; }
  // The first of the call's tokens that stays in the ring.
  FW_HOST_DEVICE int kept() const { return stored > position ? stored : position; }
};

// length: tokens of the call, at most `tokens`. previous: the position of the call before, where tokens may be taken
// back (`keeps`). One fold at most follows what the call before has left, and another one the call's own tokens.
FW_HOST_DEVICE inline RingSpan ring_span(int tokens, bool keeps, int position, int previous, int length) {
  RingSpan span;
  span.tokens = tokens;
  span.position = position < 0 ? 0 : position;
  const int before = !keeps || previous > span.position ? span.position : previous < 0 ? 0 : previous;
  span.base = before / tokens * tokens;
  span.stored = span.begin(keeps ? span.position : span.position + length);
  const int read = length > 0 ? span.begin(span.position + length - 1) : span.base;
  span.last = read > span.stored ? read : span.stored;
  return span;
}

// Rows that a step of `length` tokens reads and writes at most.
FW_HOST_DEVICE inline int64_t ring_rows(int64_t tokens, bool keeps, int64_t length) {
  return tokens - 1 + (keeps ? 2 : 1) * length;
}

}  // namespace fw
