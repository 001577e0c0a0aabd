// Initialisers of parameters (recurrence.md section 7). Each returns the function a ParamSpec holds.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/random.h"

namespace fw {

using Initialiser = std::function<void(std::span<double>, Random&)>;

// Xavier uniform with gain 2^-2.5; N(0, 0.02); or as PyTorch's Linear begins: uniform within 1 / sqrt(in).
enum class InitScheme { kXavier, kNormal, kTorch };

Initialiser constant_init(double value);
Initialiser normal_init(double deviation);
Initialiser uniform_init(double bound);  // [-bound, bound)
// Of a projection [out, in].
Initialiser projection_init(InitScheme scheme, int64_t out, int64_t in);
// a = log U(low, 16), the uniform kept away from 0 so that a is finite.
Initialiser decay_a_init(double low);
// Value i of a parameter is f(i): what depends on a channel's index alone. f may be called by several threads at once.
Initialiser index_init(std::function<double(double)> f);
// delta = softplus^-1(dt), dt log-uniform in [1e-3, 0.1] and at least 1e-4.
Initialiser decay_delta_init();

}  // namespace fw
