#include "nn/init.h"

#include <algorithm>
#include <cmath>

namespace fw {

Initialiser constant_init(double value) {
  return [value](std::span<double> out, Random&) { std::fill(out.begin(), out.end(), value); };
}

Initialiser normal_init(double deviation) {
  return [deviation](std::span<double> out, Random& random) {
    for (double& x : out) x = deviation * random.normal();
  };
}

Initialiser uniform_init(double bound) {
  return [bound](std::span<double> out, Random& random) {
    for (double& x : out) x = random.uniform(-bound, bound);
  };
}

Initialiser projection_init(InitScheme scheme, int64_t out, int64_t in) {
  if (scheme == InitScheme::kNormal) return normal_init(0.02);
  const double gain = std::exp2(-2.5);
  return uniform_init(gain * std::sqrt(6.0 / static_cast<double>(in + out)));
}

Initialiser decay_a_init(double low) {
  return [low](std::span<double> out, Random& random) {
    for (double& x : out) x = std::log(std::max(random.uniform(low, 16.0), 1e-4));
  };
}

Initialiser decay_delta_init() {
  return [](std::span<double> out, Random& random) {
    for (double& x : out) {
      const double dt = std::max(std::exp(random.uniform(std::log(1e-3), std::log(0.1))), 1e-4);
      x = dt + std::log(-std::expm1(-dt));  // softplus(x) = dt
    }
  };
}

}  // namespace fw
