// TOML from files that nobody has vouched for. toml++ recurses into what nests, and its own limit does not see the
// parts of a dotted key: how deep a text nests is counted before it is parsed.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace fw::cli {

// Run files have 2; a stack bears thousands.
inline constexpr size_t kMaxTomlDepth = 32;

// Throws Error(kUsage) naming `path` and the line for text that is not TOML or nests too deep. `path` stands in the
// nodes' sources.
toml::table parse_toml(std::string_view text, const std::string& path);

}  // namespace fw::cli
