// JSON as Python writes it: with NaN, Infinity and -Infinity, and with numbers beyond the range of a double. Files of
// data have them in fields that nobody reads.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fw {

// The text as strict JSON: each of these is a number that takes its place, and the rest is as it was. For parsers that
// do not read numbers.
std::string without_python_numbers(std::string_view text);

// As parse_json() (base/json.h), where these are floats that are NaN or infinite. Who reads a number refuses them.
nlohmann::json parse_python_json(std::string_view text, const std::string& where);

// The same of a model's configuration: each of these numbers becomes {"__float__": "Infinity"}, which is how
// transformers writes the same value.
nlohmann::json parse_python_config(std::string_view text, const std::string& where);

}  // namespace fw
