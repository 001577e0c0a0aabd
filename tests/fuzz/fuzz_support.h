// What the fuzz targets share. A reader may end with fw::Error and nothing else. Anything else that is thrown, any
// fault that a sanitizer sees and any promise that does not hold ends the process, which is how libFuzzer learns of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "base/error.h"

// The entry that libFuzzer looks for.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fw::fuzz {

inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// Runs a reader on hostile input: a usage error is an answer, an internal error is a defect.
template <class Call>
void expect_error_or_nothing(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kUsage, error.what());
  }
}

inline std::span<const std::byte> bytes_of(const uint8_t* data, size_t size) {
  return std::as_bytes(std::span(data, size));
}

}  // namespace fw::fuzz
