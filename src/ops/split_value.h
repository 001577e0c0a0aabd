// A float32 as two numbers of 16 bits: the nearest bf16, which products take as it is, and what is left, low. Together
// they are the float32, to the bit.
//
// low is the lower half of the bits, read as a signed number (its sign says whether rounding went up): bits =
// rounded * 2^16 + low, -2^15 <= low < 2^15. That fixes how ties are rounded: half a unit is -2^15 from above and
// cannot be 2^15 from below, so the nearest bf16 of two as near is the one away from zero. (To even, as elsewhere, both
// neighbours of an even number would want the same low, and 16 bits would not do. A trained value is a tie once in
// 65,536 times; truncation instead, the upper half as it is, would make every operand half a unit too small on
// average.) A NaN stays one and loses its lower half.
#pragma once

#include <cstdint>

#include "rule/token_scalars.h"

namespace fw {

struct SplitValue {
  uint16_t rounded;  // of a bf16
  uint16_t low;
};

FW_HOST_DEVICE inline SplitValue split_value(uint32_t bits) {
  const uint32_t upper = bits >> 16;
  // rounded, it might carry into the sign
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(upper | 0x40u), 0};
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}

// The bits of the float32.
FW_HOST_DEVICE inline uint32_t join_value(SplitValue x) {
  return (static_cast<uint32_t>(x.rounded) << 16) +
         static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(x.low)));
}

}  // namespace fw
