// Whether decoding uses a ring of the last tokens for a recurrence (fw_ring of the C header). Its steps then write one
// row of the ring instead of the state. A fold writes the state every few tokens.
#pragma once

#include <cstdint>
#include <optional>

#include "fastweight/fastweight.h"
#include "nn/recurrence_shape.h"
#include "ops/backend.h"

namespace fw {

// Tokens from fold to fold, unless somebody gives another number.
inline constexpr int64_t kRingTokens = 16;

// Whether steps of this rule on this device can have a ring.
bool has_ring(const Rule& rule, fw_device device);

// Values that a token's step reads and writes for one head, on average over the tokens from fold to fold: of state and
// ring, without the token's own tensors. ring_tokens 0: without a ring.
double step_traffic(const RecurrenceShape& shape, int64_t ring_tokens);

// Tokens of the ring for decoding `sequences` side by side, 0: none. A ring changes the last bits of a token. So there
// is one choice for all numbers of sequences among which each has the same bits: up to rows.decode, and from there to
// rows.swiglu. The latter count as kSomeSequences.
//
// | a ring of kRingTokens if all hold | |
// |---|---|
// | device | CUDA; on the CPU it is no faster |
// | rule | has_ring() |
// | sequences | more than rows.decode, up to which a sequence has the bits that it has alone |
// | saved share of step_traffic() | a quarter or more |
// | saved bytes of all heads | what a GPU moves in 2 us or more; launches take the time below that |
int64_t ring_by_cost(const RecurrenceShape& shape, int64_t sequences, fw_device device, const RowLimits& rows);
inline constexpr int64_t kSomeSequences = 16;

// The number that was given, or that by cost; 0 where the rule has no ring.
int64_t choose_ring(const std::optional<int64_t>& given, const RecurrenceShape& shape, int64_t sequences,
                    fw_device device, const RowLimits& rows);

}  // namespace fw
