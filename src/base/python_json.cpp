#include "base/python_json.h"

#include <array>
#include <nlohmann/json.hpp>

#include "base/json.h"

namespace fw {
namespace {

constexpr std::array<std::string_view, 3> kNumbers = {"-Infinity", "Infinity", "NaN"};

std::string with_objects(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (text[i] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = end < text.size() ? end + 1 : text.size();
      result += text.substr(i, end - i);
      i = end;
      continue;
    }
    std::string_view number;
    for (const std::string_view known : kNumbers) {
      if (text.substr(i, known.size()) == known) number = known;
    }
    if (number.empty()) {
      result += text[i++];
    } else {
      result += "{\"__float__\": \"" + std::string(number) + "\"}";
      i += number.size();
    }
  }
  return result;
}

}  // namespace

nlohmann::json parse_python_json(std::string_view text, const std::string& where) { return parse_json(with_objects(text), where); }

}  // namespace fw
