// Errors inside the engine: one exception type that carries what a user needs (which argument or file, what was
// expected, what came, what to do) and the class that decides the exit code. Nothing throws across the C header:
// src/scan/api.cpp turns these into status codes.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace fw {

enum class ErrorKind {
  kUsage,     // bad option, configuration, argument or input file: exit code 2
  kIo,        // the operating system refused (disk full, permission): exit code 2 as well, nothing was damaged
  kNumeric,   // a training run that diverged: exit code 1
  kInternal,  // a defect of this program: exit code 3
  kStopped,   // nothing is wrong, somebody asked for the end (base/stop.h): exit code 128 + the signal
};

// A message that quotes a file may be as long as the file: its beginning and its end are what a reader needs.
inline constexpr size_t kMessageBegin = 6144, kMessageEnd = 2048;
inline std::string bounded_message(const std::string& message) {
  if (message.size() <= kMessageBegin + kMessageEnd) return message;
  // a character
  const auto inside = [&](size_t i) { return (static_cast<unsigned char>(message[i]) & 0xc0u) == 0x80u; };
  size_t begin = kMessageBegin, end = message.size() - kMessageEnd;
  while (begin > 0 && inside(begin)) --begin;
  while (end < message.size() && inside(end)) ++end;
  return message.substr(0, begin) + fmt::format(" ... ({} bytes left out) ... ", end - begin) + message.substr(end);
}

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(bounded_message(message)), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// No device that can run a call: FW_ERROR_DEVICE in the C header, exit code 2 in the program.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message) : Error(ErrorKind::kUsage, message) {}
};

template <class... Args>
[[noreturn]] void fail_usage(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kUsage, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_io(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kIo, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_numeric(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kNumeric, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_internal(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kInternal, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fw
