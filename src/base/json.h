// JSON from files that nobody has vouched for. nlohmann's parser takes any depth, but copying, comparing and printing
// what it made recurse, so that 50,000 opening brackets end the stack: how deep a text nests is counted before anything
// is built from it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fw {

// Far above what any file read here has (a Hugging Face configuration inside ours: 4), far below what a stack bears.
inline constexpr int kMaxJsonDepth = 64;

// Throws Error(kUsage) "<where>: ..." when more than kMaxJsonDepth objects and arrays are open at once. For texts that
// go to a parser of their own; parse_json() has it.
void check_json_depth(std::string_view text, const std::string& where);

// Throws Error(kUsage) "<where>: ..." for text that is not JSON or nests too deep.
nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace fw
