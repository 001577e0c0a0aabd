#include "base/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <string_view>

#include "base/error.h"

namespace fw {
namespace {

using Bytes = std::optional<uint64_t>;

std::atomic<bool> too_much_is_allowed = false;

void lower(Bytes& least, Bytes bytes) {
  if (bytes && (!least || *bytes < *least)) least = bytes;
}

// The number after a word that begins a line: "MemAvailable:" or "inactive_file".
Bytes number_behind(const std::string& path, std::string_view word) {
  std::ifstream in(path);
  std::string found;
  for (uint64_t number = 0; in >> found >> number; in.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (found == word) return number;
  }
  return {};
}

// A file that is one number; nothing for "max".
Bytes number_in(const std::string& path) {
  std::ifstream in(path);
  uint64_t number = 0;
  return in >> number ? Bytes(number) : Bytes();
}

struct GroupFiles {
  const char *limit, *used, *reclaimable;  // the last: a word of memory.stat, the page cache that goes first
};
constexpr GroupFiles kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/memory.max", "/memory.current", "inactive_file"};

// What a group and those above it leave. In a container the path may be that of the host, of which only the root is
// there.
void lower_by_groups(Bytes& least, const std::string& root, std::string path, const GroupFiles& files) {
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    const std::string folder = root + path;
    const Bytes limit = number_in(folder + files.limit), used = number_in(folder + files.used);
    if (limit && used) {
      const uint64_t held =
          *used - std::min(*used, number_behind(folder + "/memory.stat", files.reclaimable).value_or(0));
      lower(least, *limit - std::min(*limit, held));
    }
    if (path.empty()) return;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

std::string amount(double bytes) {
  if (bytes >= 0x1p50) return "more than 1024 TiB";
  const std::pair<double, const char*> unit = bytes >= 0x1p40   ? std::pair(0x1p40, "TiB")
                                              : bytes >= 0x1p30 ? std::pair(0x1p30, "GiB")
                                                                : std::pair(0x1p20, "MiB");
  return fmt::format("{:.1f} {}", bytes / unit.first, unit.second);
}

}  // namespace

std::optional<uint64_t> available_memory(const std::string& proc, const std::string& cgroups) {
  Bytes least;
  if (const Bytes kilobytes = number_behind(proc + "/meminfo", "MemAvailable:")) least = *kilobytes << 10;
  std::ifstream groups(proc + "/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:PATH
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      lower_by_groups(least, cgroups, path, kVersion2);
      lower_by_groups(least, cgroups + "/unified", path, kVersion2);
    } else if (fmt::format(",{},", controllers).find(",memory,") != std::string::npos) {
      lower_by_groups(least, cgroups + "/memory", path, kVersion1);
    }
  }
  return least;
}

std::optional<uint64_t> available_address_space() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  const uint64_t used = number_in("/proc/self/statm").value_or(0) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return limit.rlim_cur - std::min<uint64_t>(limit.rlim_cur, used);
}

std::optional<uint64_t> available_memory() {
  Bytes least = available_memory("/proc", "/sys/fs/cgroup");
  lower(least, available_address_space());
  return least;
}

void require_memory(double bytes, const std::string& what, const std::string& advice) {
  if (!memory_is_checked()) return;
  const std::optional<uint64_t> available = available_memory();
  if (!available || bytes <= static_cast<double>(*available)) return;
  fail_usage("{} takes {} of memory, {} are available: {}", what, amount(bytes),
             amount(static_cast<double>(*available)), advice);
}

bool memory_is_checked() { return !too_much_is_allowed; }
std::optional<uint64_t> parse_bytes(const std::string& text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number)) return std::nullopt;
  const std::string unit(rest, end);
  constexpr std::string_view kUnits = "KMGT";
  double factor = 1;
  if (!unit.empty()) {
    const size_t power = kUnits.find(unit.front());
    const bool decimal = unit.size() == 2 && unit.back() == 'B';
    if (power == std::string_view::npos || !(unit.size() == 1 || decimal || unit.substr(1) == "iB"))
      return std::nullopt;
    factor = std::pow(decimal ? 1000.0 : 1024.0, static_cast<double>(power + 1));
  }
  const double bytes = std::floor(number * factor);
  if (bytes < 1 || bytes >= 0x1p63) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

void allow_too_much_memory(bool allow) { too_much_is_allowed = allow; }

}  // namespace fw
