#include "base/json.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"

namespace fw {

// Counts what the parser would open: brackets outside of strings. In text that is not JSON it may count others too;
// then either refusal is right.
void check_json_depth(std::string_view text, const std::string& where) {
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\';
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth)
        fail_usage("{}: expected JSON with at most {} objects and arrays inside each other, got more at byte {}", where,
                   kMaxJsonDepth, i);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  check_json_depth(text, where);
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    constexpr size_t kMost = 400;  // the parser quotes all that it has read of a string
    fail_usage("{}: expected JSON, got something else: {}", where, excerpt(error.what(), kMost));
  }
}

}  // namespace fw
