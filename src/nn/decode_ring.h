// Whether decoding uses a ring of the last tokens for a recurrence (fw_ring of the C header). Its steps then write one
// row of the ring instead of the state. A fold writes the state every few tokens.
#pragma once

#include <cstdint>
#include <optional>

#include "fastweight/fastweight.h"
#include "nn/recurrence_shape.h"

namespace fw {

// Tokens from fold to fold with the fewest bytes (docs/notes/2026-11-ring.md).
inline constexpr int64_t kRingTokens = 16;

// Whether steps of this rule on this device can have a ring.
bool has_ring(const Rule& rule, fw_device device);

// Tokens of the ring for decoding, 0: none, as without a number given. On an H200 token/ring takes as long as the step
// without it, though it moves two thirds of the bytes (docs/notes/2026-11-ring.md). And it changes last bits.
int64_t choose_ring(const std::optional<int64_t>& given, const Rule& rule, fw_device device);

}  // namespace fw
