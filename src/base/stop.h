// The wish that the process ends soon. A signal's handler utters it (src/cli/signals.cpp); loops that take long look at
// it and either return (Trainer::run, which writes a checkpoint first) or throw Stopped, which says how far they came.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/error.h"

namespace fw {

// Thrown by stop_point. Nothing is wrong: the program ends with the exit code of what asked it to stop.
class Stopped : public Error {
 public:
  explicit Stopped(const std::string& message) : Error(ErrorKind::kStopped, message) {}
};

const std::atomic<bool>& stop_flag();
void request_stop();   // safe in a signal's handler
void withdraw_stop();  // for tests

// Throws Stopped("WHAT: stopped after DONE of TOTAL UNIT") if the wish was uttered. total < 0: not known.
void stop_point(const char* what, int64_t done, int64_t total, const char* unit);

}  // namespace fw
