// What a recurrence is, but for its sequences; and what a ring of the last tokens changes in its steps.
#pragma once

#include <cstdint>

#include "fastweight/fastweight.h"
#include "rule/gates.h"
#include "rule/rule.h"

namespace fw {

// The ring of a step (fw_ring of the C header). Its rows are as many as its tokens.
struct StepRing {
  int64_t tokens = 0;                  // from fold to fold; 0: steps write the states
  const int32_t* positions = nullptr;  // [N] in device memory
  bool operator==(const StepRing&) const = default;
};

// Where a step of several tokens a sequence leaves the state after each of them, so that the last ones can be taken
// back (fw_speculation of the C header). The states are a pool of `per_sequence` slots a sequence.
struct StepSlots {
  int64_t tokens = 0;  // of a sequence in a step; 0: no pool, the states of a sequence are its only ones
  int64_t per_sequence = 0;
  const int32_t* from = nullptr;  // [N] in device memory: the slot that a sequence goes on from
  const int32_t* to = nullptr;    // [N, tokens], the same
  bool operator==(const StepSlots&) const = default;
};

struct RecurrenceShape {
  Rule rule;
  int64_t heads = 0, v_heads = 0, key_dim = 0, value_dim = 0;
  fw_form form = FW_FORM_AUTO;
  double scale = 0;      // of the read vector; 0: K^-1/2
  int64_t rows = 1;      // that a token of the layout has in the tensors, one after the other
  Gates gates = {};      // those that are logits
  bool v_first = false;  // states are [N, HV, V, K], which a GPU's kernels read fastest
  StepRing ring = {};    // of sequences of one token each
  StepSlots slots = {};  // with tokens: that many neighbouring ones of the layout's single tokens are a sequence
  bool operator==(const RecurrenceShape&) const = default;
};

// Numbers of a token in the ring: w [K], u [V], the decay.
inline int64_t ring_width(const RecurrenceShape& shape) {
  const int64_t decays = shape.rule.decay == Decay::kChannel  ? shape.key_dim
                         : shape.rule.decay == Decay::kScalar ? 1
                                                              : 0;
  return shape.key_dim + shape.value_dim + decays;
}

}  // namespace fw
