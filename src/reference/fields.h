// Checks of a reference problem's sizes, shared by the general reference and the papers' formulas.
#pragma once

#include <string_view>

#include "reference/reference.h"

namespace fw {

inline int64_t heads_or_key_heads(int64_t heads, const ReferenceShape& s) { return heads == 0 ? s.H : heads; }

// Whether an input or output of that name has a row for every token.
bool of_tokens(std::string_view name);
// Whether an input of that name is one for all sequences.
bool is_parameter(std::string_view name);

// Each throws Error(kUsage) naming what does not fit.
void check_shape(const ReferenceShape& shape);
void check_inputs(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in);
void check_cotangents(const Rule& rule, const ReferenceShape& shape, const ReferenceOutputs& d);

}  // namespace fw
