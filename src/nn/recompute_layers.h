// What of a model's layers backward recomputes (recompute.h), and the memory that its passes take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nn/recompute.h"

namespace fw {

// The first `layers` layers have a level, the others the one below it.
struct RecomputeLayers {
  Recompute level = Recompute::kNone;
  int64_t layers = INT64_MAX;
  Recompute of(int64_t layer) const {
    return layer < layers || level == Recompute::kNone ? level : static_cast<Recompute>(static_cast<int>(level) - 1);
  }
  bool operator==(const RecomputeLayers&) const = default;
};

// Bytes of what a pass keeps for its backward, with workspace, and of what is recomputed.
struct Scratch {
  size_t kept = 0, recomputed = 0;
  size_t total() const { return kept + recomputed; }
};

}  // namespace fw
