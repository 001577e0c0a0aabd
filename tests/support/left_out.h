// Fewer cases with a sanitizer, which takes ten times as long for each.
#pragma once

#include <cstdint>

namespace fw::testing {

// Whether a case is left out: with a sanitizer all but one in `share` of those counted by turn. Every rule still meets
// the code of every case, but not each with each. Shares have no factor in common with the number of a rule's cases,
// so that from rule to rule it is another one.
inline bool left_out([[maybe_unused]] int64_t turn, [[maybe_unused]] int64_t share) {
#if defined(FW_SMALL_TESTS)
  return turn % share != 0;
#else
  return false;
#endif
}

}  // namespace fw::testing
