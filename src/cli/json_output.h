// JSON on standard output (docs/json.md): one report a command, or one object a line. Numbers that are not finite are
// null, bytes that are not UTF-8 are U+FFFD.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace fw::cli {

using Json = nlohmann::ordered_json;

// What every report begins with: the program's version, its commit ("": not known) and the command.
Json json_report(const std::string& command);
// Lines of `indent` (-1: one line), with the last line's end.
std::string json_text(const Json& json, int indent);
void print_json_report(const Json& report);
// One object on a line of its own, there at once.
void print_json_line(const Json& object);

}  // namespace fw::cli
