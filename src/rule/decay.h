// The decay that is a constant of its head (Decay::kConstant, RetNet): 1 - 2^(-5-h) for value head h.
#pragma once

#include <cmath>
#include <cstdint>

#include "rule/front.h"

namespace fw {

FW_HOST_DEVICE inline double constant_decay(int64_t head) { return 1.0 - std::ldexp(1.0, -5 - static_cast<int>(head)); }

}  // namespace fw
