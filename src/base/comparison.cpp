#include "base/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace fw {

double euclidean_norm(std::span<const double> x) {
  double square = 0;
  for (double y : x) square += y * y;
  return std::sqrt(square);
}

double relative_error(std::span<const double> got, std::span<const double> expected, double floor) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (got.size() != expected.size()) return kWrong;
  double square = 0;
  bool equal = true;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i]) || !std::isfinite(expected[i])) return kWrong;
    equal = equal && got[i] == expected[i];
    square += (got[i] - expected[i]) * (got[i] - expected[i]);
  }
  if (equal) return 0;
  const double scale = std::max(euclidean_norm(expected), floor);
  return scale > 0 ? std::sqrt(square) / scale : kWrong;
}

std::string furthest_element(const std::string& name, std::span<const int64_t> shape, std::span<const double> got,
                             std::span<const double> expected) {
  size_t at = 0;
  double largest = -1;
  for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    const double distance = std::abs(got[i] - expected[i]);
    if (distance <= largest) continue;  // also where it is not a number: that one is the furthest
    largest = std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance;
    at = i;
  }
  std::vector<size_t> index(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    const size_t n = static_cast<size_t>(std::max<int64_t>(shape[i], 1));
    index[i] = at % n;
    at /= n;
  }
  return fmt::format("{}[{}]", name, fmt::join(index, ", "));
}

}  // namespace fw
