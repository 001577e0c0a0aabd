// Central differences of fourth order, (8 (f(x+h) - f(x-h)) - (f(x+2h) - f(x-2h))) / 12 h. With h = 1e-4 they are exact
// to about 1e-11 of |f| / scale of x, far below the 1e-6 that gradients are held to.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace fw::testing {

// df / dx[i]; x is restored.
double difference(const std::function<double()>& f, double& x, double h = 1e-4);

// All derivatives, or those at `indices`.
std::vector<double> differences(const std::function<double()>& f, std::vector<double>& x, double h = 1e-4);
std::vector<double> differences(const std::function<double()>& f, std::vector<double>& x,
                                const std::vector<size_t>& indices, double h = 1e-4);

// At most `count` indices below `size`, spread over it, always the same for a seed.
std::vector<size_t> sample_indices(size_t size, size_t count, uint64_t seed);

}  // namespace fw::testing
