#include "base/python_json.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"

namespace fw {
namespace {

// What stands in the place of a number that JSON does not have. No file has these: they are the smallest doubles.
struct Stand {
  std::string_view text;
  double value, meant;
};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Stand kNan = {"5e-324", 5e-324, std::numeric_limits<double>::quiet_NaN()};
constexpr Stand kPositive = {"1e-323", 1e-323, kInfinity};
constexpr Stand kNegative = {"-1e-323", -1e-323, -kInfinity};

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.';
}

// Null: the word is one that JSON has.
const Stand* stand_for(std::string_view word) {
  if (word == "NaN") return &kNan;
  if (word == "Infinity") return &kPositive;
  if (word == "-Infinity") return &kNegative;
  const bool number = !word.empty() && (word[0] == '-' || (word[0] >= '0' && word[0] <= '9'));
  constexpr size_t kShort = 300;  // digits that no double is too small for
  if (!number || (word.size() < kShort && word.find_first_of("eE") == std::string_view::npos)) return nullptr;
  char* end = nullptr;
  const std::string own(word);
  const double value = std::strtod(own.c_str(), &end);
  if (end != own.c_str() + own.size() || std::isfinite(value)) return nullptr;
  return value > 0 ? &kPositive : &kNegative;
}

void give_meaning(nlohmann::json& json) {
  if (json.is_structured()) {
    for (nlohmann::json& inside : json) give_meaning(inside);
  } else if (json.is_number_float()) {
    for (const Stand* stand : {&kNan, &kPositive, &kNegative}) {
      if (json.get<double>() == stand->value) {
        json = stand->meant;
        return;
      }
    }
  }
}

}  // namespace

std::string without_python_numbers(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (text[i] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (is_word(text[i])) {
      while (end < text.size() && is_word(text[end])) ++end;
      if (const Stand* stand = stand_for(text.substr(i, end - i))) {
        out += stand->text;
        i = end;
        continue;
      }
    }
    out += text.substr(i, end - i);
    i = end;
  }
  return out;
}

nlohmann::json parse_python_json(std::string_view text, const std::string& where) {
  try {
    return parse_json(text, where);
  } catch (const Error&) {
    const std::string strict = without_python_numbers(text);
    if (strict == text) throw;
    nlohmann::json json = parse_json(strict, where);
    give_meaning(json);
    return json;
  }
}

nlohmann::json parse_python_config(std::string_view text, const std::string& where) {
  nlohmann::json all = parse_python_json(text, where);
  const auto name = [](nlohmann::json& value, const auto& self) -> void {
    if (value.is_structured()) {
      for (auto& inside : value) self(inside, self);
    } else if (value.is_number_float()) {
      const double x = value.get<double>();
      if (!std::isfinite(x)) value = {{"__float__", std::isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity"}};
    }
  };
  name(all, name);
  return all;
}

}  // namespace fw
