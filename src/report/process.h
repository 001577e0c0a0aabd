// Runs another program without a shell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fw {

struct ProcessResult {
  bool started = false;  // false: not found or not executable
  int exit_code = -1;    // 128 + signal when it was killed
  std::string output;    // standard output, the first 256 MiB
  std::string errors;    // standard error, the first 64 KiB
};

// argv[0] is looked up in PATH; `input` is given on stdin. Waits for its end. Error(kIo) when pipes cannot be made.
ProcessResult run_process(const std::vector<std::string>& argv, std::string_view input);

}  // namespace fw
