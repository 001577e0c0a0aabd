#include "cli/bench_report.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace fw::cli {
namespace {

// "VmHWM:    12345 kB" of /proc/self/status.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  fail_io("/proc/self/status has no line {}: memory cannot be measured here", key);
}

}  // namespace

double Samples::best() const {
  if (values_.empty()) fail_internal("no samples");
  return *std::min_element(values_.begin(), values_.end());
}

double Samples::median() const {
  if (values_.empty()) fail_internal("no samples");
  std::vector<double> sorted = values_;
  std::sort(sorted.begin(), sorted.end());
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : 0.5 * (sorted[half - 1] + sorted[half]);
}

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int64_t resident_bytes() { return status_bytes("VmRSS"); }
int64_t peak_bytes() { return status_bytes("VmHWM"); }
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5\n"; }

}  // namespace fw::cli
