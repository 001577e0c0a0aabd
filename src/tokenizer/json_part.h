// A value of a JSON file with the place where it stands: what is wrong is refused by file and place ("'tokenizer.json':
// model.merges[7]").
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

class JsonPart {
 public:
  JsonPart(const nlohmann::json& value, std::string file, std::string location = "")
      : value_(&value), file_(std::move(file)), location_(std::move(location)) {}

  const nlohmann::json& value() const { return *value_; }
  bool has(const char* key) const;         // there, and not null
  JsonPart at(const char* key) const;      // of an object; refuses what has() has not
  std::vector<JsonPart> elements() const;  // of an array
  JsonPart element(size_t index) const;    // of an array that has it
  void expect_object() const;
  void expect_array() const;
  const std::string& text() const;
  // Keys that may be missing or null.
  std::string text_or(const char* key, const std::string& otherwise) const;
  bool flag_or(const char* key, bool otherwise) const;
  int64_t integer(int64_t least, int64_t most) const;
  // The one character of a string.
  std::string character() const;

  // "'FILE': PLACE: expected ..., got ...", and what to do where that is not plain.
  [[noreturn]] void refuse(std::string_view expected) const;
  // "'FILE': PLACE: ..." in words of the caller.
  [[noreturn]] void fail(std::string_view words) const;

 private:
  const nlohmann::json* value_;
  std::string file_, location_;
};

}  // namespace fw
