// Gates given as logits (recurrence.md 2.1), in double and in words of their own: values from logits, and gradients
// back.
#pragma once

#include "reference/reference.h"

namespace fw {

// `in` with values in place of logits.
ReferenceInputs gate_values(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in);

// In grad, the gradients of values become those of logits, and those of a_log and dt_bias are made. in: as the caller
// gave it.
void gate_gradients(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in, ReferenceInputs& grad);

}  // namespace fw
