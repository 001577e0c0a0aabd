// What a model costs, from its configuration alone: parameters, floating-point operations a token, what it remembers.
// Nothing is allocated, so that models larger than the machine can be looked at. The memory of a training step is
// train/memory_plan.h's.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace fw {

struct ModelCost {
  double parameters = 0;
  double active_parameters = 0;  // that a token passes: of experts the chosen
  // A multiplication and an addition are two. Forward, the mean over the tokens of a sequence; a training step takes
  // three times as many. Products with weights, scores and values of attention, the recurrence in its token form;
  // neither norms nor activations.
  double flops_token = 0;
  double flops_attention = 0;   // of those, what grows with the length or the window
  double flops_recurrence = 0;  // of those, reads and writes of the matrices
  // Of one sequence, in float32: what stays the same however long it is (rings counted full), and what each token adds.
  double state_bytes = 0;
  double state_bytes_token = 0;
};

// Of a valid configuration, for sequences of `length` tokens.
ModelCost cost_of(const ModelConfig& config, int64_t length);

}  // namespace fw
