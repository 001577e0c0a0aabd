// The decay that is a constant of its head (Decay::kConstant, RetNet): 1 - 2^(-5-h) for value head h.
#pragma once

#include <cmath>
#include <cstdint>

namespace fw {

inline double constant_decay(int64_t head) { return 1.0 - std::exp2(-5.0 - static_cast<double>(head)); }

}  // namespace fw
