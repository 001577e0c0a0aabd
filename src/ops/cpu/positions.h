// Where the tokens of a pass stand in their sequences.
#pragma once

#include "ops/ops.h"

namespace fw {

// body(t, position) for every token: position counts from 0 at the sequence's first token, those of earlier passes
// included.
template <class Body>
void for_each_position(const PassLayout& layout, const Body& body) {
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const int64_t before = layout.positions == nullptr ? 0 : layout.positions[n];
    for (int64_t t = layout.host.begin(n); t < layout.host.end(n); ++t) body(t, before + t - layout.host.begin(n));
  }
}

}  // namespace fw
