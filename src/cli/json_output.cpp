#include "cli/json_output.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/error.h"
#include "cli/build_name.h"
#include "fastweight/fastweight.h"
#include "report/progress.h"

namespace fw::cli {
namespace {
// A terminal gets escapes in place of what is not ASCII, which JSON reads as the same. So control characters among it
// (U+009B, U+202E) do not reach the terminal. The exception is DEL, which no terminal heeds.
std::string output_text(const Json& json, int indent) {
  return json.dump(indent, ' ', is_terminal(1), Json::error_handler_t::replace) + "\n";
}
}  // namespace

std::string json_text(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json json_report(const std::string& command) {
  return {{"fastweight", fw_version()}, {"commit", build_commit()}, {"command", command}};
}

void print_json_report(const Json& report) { fmt::print("{}", output_text(report, 2)); }

void print_json_line(const Json& object) {
  const std::string line = output_text(object, -1);
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size() || std::fflush(stdout) != 0)
    fail_io("cannot write to standard output");
}

}  // namespace fw::cli
