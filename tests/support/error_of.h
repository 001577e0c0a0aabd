// What a call throws.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "base/error.h"

namespace fw::testing {

// The message of the error that f throws, which has to be of that kind; "" if it throws none.
inline std::string error_of(const std::function<void()>& f, ErrorKind kind = ErrorKind::kUsage) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "";
}

}  // namespace fw::testing
