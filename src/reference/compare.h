// Relative L2 errors of results against the reference.
#pragma once

#include <string>

#include "base/comparison.h"
#include "reference/reference.h"

namespace fw {

struct FieldError {
  std::string name;
  double error;
};

// Errors of all fields that `expected` has. A denominator is at least floor_share of the norm of all expected fields
// together: some gradients (the preconditioner's gates) are so small a part of the whole that float32 cannot give them
// to many digits. 0: none.
std::vector<FieldError> compare(const ReferenceOutputs& got, const ReferenceOutputs& expected, double floor_share = 0);
std::vector<FieldError> compare(const ReferenceInputs& got, const ReferenceInputs& expected, double floor_share = 0);

// The gradients a_log and dt_bias, and the preconditioner's, alone. They are sums over all tokens, whose terms cancel.
// What their float sums are compared with is the size of the terms, that of the gradient of the logits, or floor_share
// of all gradients as in compare(), which has the others of without_parameters().
std::vector<FieldError> compare_parameters(const ReferenceInputs& got, const ReferenceInputs& expected,
                                           double floor_share = 0);
ReferenceInputs without_parameters(ReferenceInputs grads);

// The largest of them; "none", 0 for an empty list.
FieldError worst(const std::vector<FieldError>& errors);

}  // namespace fw
