// Checks of a reference problem's sizes, shared by the general reference and the papers' formulas.
#pragma once

#include "reference/reference.h"

namespace fw {

inline int64_t heads_or_key_heads(int64_t heads, const ReferenceShape& s) { return heads == 0 ? s.H : heads; }

// Each throws Error(kUsage) naming what does not fit.
void check_shape(const ReferenceShape& shape);
void check_inputs(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in);
void check_cotangents(const Rule& rule, const ReferenceShape& shape, const ReferenceOutputs& d);

}  // namespace fw
