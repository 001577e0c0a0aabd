// Structs of the C header that begin with their size and may grow at their end: what a program compiled with another
// version of the header gives, made whole.
#pragma once

#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace fw {

// first: bytes of the struct in version 0.2.0. argument, type: for messages. Throws Error(kUsage).
template <class Struct>
void check_struct_size(size_t size, size_t first, std::string_view argument, std::string_view type) {
  if (size > sizeof(Struct)) {
    fail_usage(
        "{}: size: expected at most {}, the bytes of {} in this library, got {}: the program was compiled with a newer "
        "fastweight.h; install "
        "that version's library, or compile the program with this library's header",
        argument, sizeof(Struct), type, size);
  }
  if (size < first || size % alignof(Struct) != 0) {
    fail_usage(
        "{}: size: expected {} to {}, the bytes of {}, got {}: call {}_init before other fields are set; programs for "
        "a header older than 0.2.0 must be "
        "compiled again",
        argument, first, sizeof(Struct), type, size, type);
  }
}

// A struct with the given fields, and those of `defaults` after them.
template <class Struct>
Struct complete_struct(const Struct& given, const Struct& defaults, size_t first, std::string_view argument,
                       std::string_view type) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  const size_t size = given.size;
  check_struct_size<Struct>(size, first, argument, type);
  Struct all = defaults;
  std::memcpy(&all, &given, size);
  all.size = sizeof(all);
  return all;
}

// Sets `size` bytes of the caller's struct: defaults where this library knows the field, zeros after them. The size is
// the caller's, so a call refuses a struct that is larger than the library's.
template <class Struct>
void init_struct(Struct* pointer, size_t size, const Struct& defaults) {
  if (pointer == nullptr || size < sizeof(size)) return;
  std::memset(static_cast<void*>(pointer), 0, size);
  std::memcpy(static_cast<void*>(pointer), &defaults, size < sizeof(Struct) ? size : sizeof(Struct));
  std::memcpy(static_cast<void*>(pointer), &size, sizeof(size));
}

}  // namespace fw
