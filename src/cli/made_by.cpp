#include "cli/made_by.h"

#include <fstream>
#include <vector>

#include "base/device.h"
#include "cli/build_name.h"

namespace fw::cli {
namespace {

std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t at = line.find(": ");
    if (at != std::string::npos) return line.substr(at + 2);
  }
  return "cpu";
}

// The program's name without its folder, and its arguments.
std::vector<std::string> command_line() {
  std::ifstream in("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(in, word, '\0');) words.push_back(word);
  if (!words.empty()) words.front().erase(0, words.front().rfind('/') + 1);
  return words;
}

}  // namespace

Provenance provenance_here(const std::string& device) {
  device_named(device);
  return {build_name(), command_text(command_line()), device == "cpu" ? processor() : device_info().name, today_utc()};
}

}  // namespace fw::cli
