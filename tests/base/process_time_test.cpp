#include "base/process_time.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace fw {
namespace {

// A new process has run for as long as it has waited, though its parent's clock began earlier; a sandbox's clock since
// boot may be off by its start's rounding.
TEST(ProcessTime, CountsFromTheStartOfTheProcess) {
  const double before = seconds_since_process_start();
  EXPECT_GE(before, -0.02);
  EXPECT_LT(before, 3600);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const double after = seconds_since_process_start();
  EXPECT_GE(after - before, 0.03);
}

}  // namespace
}  // namespace fw
