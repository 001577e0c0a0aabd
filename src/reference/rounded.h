// Problems whose numbers a narrower type has: then the reference and a run with tensors or operands of that type begin
// from the same ones.
#pragma once

#include <utility>

#include "base/bf16.h"
#include "reference/fields.h"
#include "reference/problem.h"
#include "rule/tokens.h"

namespace fw {

// Inputs and cotangents of tokens, each number as `round` leaves it.
template <class Round>
ReferenceProblem with_rounded_tokens(ReferenceProblem p, const Round& round) {
  const auto all = [&](std::vector<double>& values) {
    for (double& x : values) x = static_cast<double>(round(static_cast<float>(x)));
  };
  for (const auto& field : reference_input_fields()) {
    if (of_tokens(field.name)) all(p.in.*field.values);
  }
  for (const auto& field : reference_output_fields()) {
    if (of_tokens(field.name)) all(p.d.*field.values);
  }
  return p;
}

inline float as_bf16(float x) {
  float value = 0;
  round_to_bf16_values(1, &x, &value);
  return value;
}
// So that a run with bf16 tensors starts from the reference's numbers.
inline ReferenceProblem of_bf16_numbers(ReferenceProblem p) { return with_rounded_tokens(std::move(p), as_bf16); }

}  // namespace fw
