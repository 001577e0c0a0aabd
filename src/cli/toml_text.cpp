#include "cli/toml_text.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace fw::cli {
namespace {

// After the string that begins at text[at]: strings are skipped whole, whatever brackets and dots are in them.
size_t behind_string(std::string_view text, size_t at) {
  const char quote = text[at];
  const std::string three(3, quote);
  const bool multiline = text.substr(at).starts_with(three);
  const std::string end = multiline ? three : std::string(1, quote);
  for (at += end.size(); at < text.size(); ++at) {
    if (quote == '"' && text[at] == '\\') {
      ++at;
    } else if (text.substr(at).starts_with(end)) {
      return at + end.size();
    } else if (!multiline && text[at] == '\n') {
      return at;  // not TOML; the parser says so
    }
  }
  return text.size();
}

// How deep a key or a table's header nests: every open bracket is a level, and so is every dot of a key. Keys below a
// header begin anew, so what is built is at most twice as deep. A dot that is no key's (of a number) counts too, which
// adds one.
void check_depth(std::string_view text, const std::string& path) {
  size_t depth = 0, dots = 0;
  std::vector<size_t> levels;  // of the brackets that are open, each with the dots of the key before it
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '"' || c == '\'') {
      at = behind_string(text, at);
      continue;
    }
    if (c == '#') {
      at = std::min(text.find('\n', at), text.size());
      continue;
    }
    if (c == '.') {
      ++dots;
    } else if (c == '[' || c == '{') {
      levels.push_back(1 + std::exchange(dots, 0));
      depth += levels.back();
    } else if (c == ']' || c == '}') {
      dots = 0;
      if (!levels.empty()) {
        depth -= levels.back();
        levels.pop_back();
      }
    } else if (c == '\n' || c == ',') {
      dots = 0;
    }
    if (depth + dots > kMaxTomlDepth) {
      fail_usage("{}:{}: expected at most {} tables and arrays inside each other, got more", path,
                 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n'), kMaxTomlDepth);
    }
    ++at;
  }
}

}  // namespace

toml::table parse_toml(std::string_view text, const std::string& path) {
  check_depth(text, path);
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    fail_usage("{}:{}: not valid TOML: {}", path, error.source().begin.line, error.description());
  }
}

}  // namespace fw::cli
