// Rules that nobody listed: points of the product of all axes, drawn at random.
#pragma once

#include "base/error.h"
#include "base/random.h"
#include "rule/rule.h"

namespace fw::testing {

inline Rule random_rule(Random& random) {
  Rule rule;
  for (const AxisInfo& axis : rule_axes()) {
    if (axis.name == "erase_state" || axis.name == "erase_write") continue;  // a device refuses other values
    axis.set(rule, static_cast<int>(random.below(axis.values.size())));
  }
  // Keys of unit length, so that most of the rules drawn are stable; raw ones where the gain takes care of that.
  rule.k_norm = rule.gain_uses_key_norm() ? rule.k_norm : Norm::kL2;
  // The preconditioner's form does nothing without it, but for the rule's name.
  if (!rule.uses_precond()) rule.precond_form = PrecondForm::kSquash;
  if (rule.precond_form == PrecondForm::kTanh) rule.precond_form = PrecondForm::kSquash;  // as above
  return rule;
}

inline bool is_valid(const Rule& rule) {
  try {
    validate(rule);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace fw::testing
