// What tests of files share: the error that a call ends with, and a limit on file sizes, which is a full disk that
// needs no file system of its own.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace fw::testing {

// The error of a call, or nothing when it ends well. Anything but fw::Error fails the test by escaping.
template <class Call>
std::optional<Error> caught(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// EXPECT_TRUE(fails(ErrorKind::kUsage, {"words", "of the message"}, call))
template <class Call>
::testing::AssertionResult fails(ErrorKind kind, std::initializer_list<std::string_view> words, Call&& call) {
  const std::optional<Error> error = caught(call);
  if (!error) return ::testing::AssertionFailure() << "no error";
  if (error->kind() != kind) return ::testing::AssertionFailure() << "another kind of error: " << error->what();
  for (const std::string_view word : words) {
    if (std::string_view(error->what()).find(word) == std::string_view::npos) {
      return ::testing::AssertionFailure() << "'" << word << "' is not in the message: " << error->what();
    }
  }
  return ::testing::AssertionSuccess();
}

// While it lives, no file of this process grows beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_ = {};
  sighandler_t handler_ = SIG_DFL;
};

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace fw::testing
