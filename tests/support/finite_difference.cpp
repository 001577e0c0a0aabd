#include "support/finite_difference.h"

#include <algorithm>
#include <numeric>

#include "base/random.h"

namespace fw::testing {

double difference(const std::function<double()>& f, double& x, double h) {
  const double at = x;
  const auto value = [&](double y) {
    x = y;
    return f();
  };
  const double near = value(at + h) - value(at - h);
  const double far = value(at + 2 * h) - value(at - 2 * h);
  x = at;
  return (8 * near - far) / (12 * h);
}

std::vector<double> differences(const std::function<double()>& f, std::vector<double>& x, double h) {
  std::vector<size_t> all(x.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return differences(f, x, all, h);
}

std::vector<double> differences(const std::function<double()>& f, std::vector<double>& x,
                                const std::vector<size_t>& indices, double h) {
  std::vector<double> d;
  d.reserve(indices.size());
  for (size_t i : indices) d.push_back(difference(f, x.at(i), h));
  return d;
}

std::vector<size_t> sample_indices(size_t size, size_t count, uint64_t seed) {
  std::vector<size_t> indices(size);
  std::iota(indices.begin(), indices.end(), size_t{0});
  Random random(seed);
  for (size_t i = 0; i < std::min(count, size); ++i) std::swap(indices[i], indices[i + random.below(size - i)]);
  indices.resize(std::min(count, size));
  return indices;
}

}  // namespace fw::testing
