// One number against its bound: what a check of results against expected values found.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fw {

// In which numbers a check computes.
enum class ConformanceType { kF64, kF32, kBf16 };

struct Comparison {
  std::string subject;  // a rule or a model
  std::string what;     // "gradients, chunk form"
  double error = 0, bound = 0;
  std::string where;    // the worst of what was compared: a tensor and its element, a token, a step
  std::string unknown;  // not empty: the subject is one that this program does not have, and nothing was compared
  // the bound is larger than the kind's own: what rounding alone does to this subject was computed, and is a part of it
  bool widened = false;
  bool passes() const { return unknown.empty() && error <= bound; }
};

// |got - expected| / max(|expected|, floor), Euclidean; 0 for two empty or equal vectors, infinity when sizes differ or a value
// of either is not finite.
double relative_error(std::span<const double> got, std::span<const double> expected, double floor = 0);

double euclidean_norm(std::span<const double> x);

// "name[1, 0, 7]": the element of a tensor of this shape where got is furthest from expected.
std::string furthest_element(const std::string& name, std::span<const int64_t> shape, std::span<const double> got,
                             std::span<const double> expected);

}  // namespace fw
