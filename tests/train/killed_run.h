// kill -9: processes that train are killed at random moments and resumed until the run is done; its end must be that of
// an undisturbed run, bit for bit. The process to kill is the test program again (a fork of a process with threads
// would hang), told by the environment to train instead of running tests.
#pragma once

#include <string>

namespace fw::testing {

// A run of 40 steps of the tiny model (training_support.h) on the device, with a checkpoint every second one. A test
// program that calls it links killed_run.cpp, which is what makes it such a process.
void expect_kills_leave_no_trace(const std::string& device, int kills, const std::string& moments = "float32");

}  // namespace fw::testing
