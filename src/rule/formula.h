// Parts of a rule as text, in the letters of docs/recurrence.md.
#pragma once

#include <string>

#include "rule/axes.h"

namespace fw {

// The gain where it depends on |k|^2, such as "beta / (|k|^2 + 1e-06)"; otherwise empty.
std::string gain_formula(const Rule& rule);

}  // namespace fw
