// Fields of the C header that have no meaning: a number there is a field of a newer header, or memory that nothing set.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace fw {

inline void check_reserved(std::string_view field, int64_t value) {
  if (value != 0)
    fail_usage("{}: expected 0, got {}: call the struct's init function before other fields are set", field, value);
}

}  // namespace fw
