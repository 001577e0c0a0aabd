// Operations of the recurrence, as models' costs and profiles count them.
#pragma once

#include <cstdint>

#include "rule/rule.h"

namespace fw {

// Of a token and a value head, forward, in the token form. A value of the matrix is decayed (1), read by the erase key
// (2), written (2) and read (2). What was found is taken away along a vector of its own (2).
inline double recurrence_flops(const Rule& rule, int64_t key_dim, int64_t value_dim) {
  const double each = (rule.uses_g() ? 1 : 0) + (rule.is_delta() ? 2 : 0) + (rule.uses_erase_write() ? 2 : 0) + 4;
  return each * static_cast<double>(key_dim * value_dim);
}

}  // namespace fw
