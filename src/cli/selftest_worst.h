// What self-tests of whole recurrences share: numbers from double and back, and the worst tensor of several.
#pragma once

#include <vector>

#include "base/comparison.h"
#include "reference/compare.h"

namespace fw::cli {

template <class T>
std::vector<T> cast(const std::vector<double>& x) {
  return {x.begin(), x.end()};
}
template <class T>
std::vector<double> doubles(const std::vector<T>& x) {
  return {x.begin(), x.end()};
}
inline void keep_worst(FieldError& worst, const char* name, const std::vector<double>& got,
                       const std::vector<double>& expected) {
  const double error = relative_error(got, expected);
  if (worst.name.empty() || !(error <= worst.error)) worst = {name, error};
}

}  // namespace fw::cli
