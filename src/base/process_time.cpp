#include "base/process_time.h"

#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace fw {
namespace {

double clock_seconds(clockid_t clock) {
  timespec now = {};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// On the clock since boot; that clock's now where the system does not say.
double start_seconds() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // The name, in parentheses, may hold anything; after it starttime is the 20th field.
  size_t at = text.rfind(')');
  for (int field = 0; field < 20 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  if (at == std::string::npos) return clock_seconds(CLOCK_BOOTTIME);
  return std::strtod(text.c_str() + at + 1, nullptr) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace

double seconds_since_process_start() {
  static const double start = start_seconds();
  return clock_seconds(CLOCK_BOOTTIME) - start;
}

}  // namespace fw
