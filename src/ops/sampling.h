// How a token is drawn from logits: the settings, and what every device's sample_tokens (ops.def) takes and leaves.
#pragma once

#include <cstdint>

namespace fw {

struct Sampling {
  double temperature = 1.0;         // 0: greedy
  int64_t top_k = 0;                // only the k likeliest; 0: off
  double top_p = 1.0;               // nucleus: only the likeliest that together reach this probability; 1: off
  double min_p = 0.0;               // only what has at least this share of the likeliest one's probability; 0: off
  double repetition_penalty = 1.0;  // > 1: ids among the recent ones become less likely; 1: off
  int64_t repetition_window = 64;   // how many tokens are recent
  bool operator==(const Sampling&) const = default;
};
// Longest repetition_window.
inline constexpr int64_t kMostRecent = 4096;

// What a sequence leaves of a draw, for the host.
struct Drawn {
  int32_t id = 0;      // -1: its logits have a NaN, or no finite largest
  int32_t unused = 0;  // so that the struct has the same bytes everywhere
  double logprob = 0;  // where asked for
};

// The sequences that draw, in device memory but for the random numbers. Sequence n's recent ids are a ring: the i-th
// that it saw is at recent[n, i mod kMostRecent].
struct DrawStreams {
  const double* uniform = nullptr;  // [N] in host memory, read before the call returns: a number of [0, 1) each
  int32_t* recent = nullptr;        // [N, kMostRecent]
  int64_t* seen = nullptr;          // [N]: how many ids are in the ring, ever; counted on
  int64_t* positions = nullptr;     // [N]: of the last token that the model has seen; counted on
  // [N]: what was drawn, a token's id in any case (0 where it failed): the model's next input
  int32_t* ids = nullptr;
  Drawn* drawn = nullptr;  // [N]
  bool logprobs = false;
  // [N]: of the last token in the rings of recurrences (nn/decode_ring.h), counted on round ring_tokens; null: no ring
  int32_t* ring_positions = nullptr;
  int32_t ring_tokens = 1;
};

}  // namespace fw
