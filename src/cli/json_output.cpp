#include "cli/json_output.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/error.h"
#include "fastweight/fastweight.h"

namespace fw::cli {
std::string json_text(const Json& json, int indent) { return json.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n"; }

Json json_report(const std::string& command) { return {{"fastweight", fw_version()}, {"command", command}}; }

void print_json_report(const Json& report) { fmt::print("{}", json_text(report, 2)); }

void print_json_line(const Json& object) {
  const std::string line = json_text(object, -1);
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size() || std::fflush(stdout) != 0) fail_io("cannot write to standard output");
}

}  // namespace fw::cli
