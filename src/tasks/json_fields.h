// Fields of a JSON object that came in a line of a file: what is missing or of another type is an Error(kUsage) that
// names file, line and key.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

class JsonFields {
 public:
  // Throws when json is no object.
  JsonFields(const nlohmann::json& json, std::string where);
  const std::string& where() const { return where_; }
  bool has(const char* key) const { return json_.contains(key); }
  const nlohmann::json& at(const char* key) const;
  std::string text(const char* key) const;
  std::string text(const char* key, const std::string& otherwise) const { return has(key) ? text(key) : otherwise; }
  // A string as it is, a number as its digits.
  std::string text_or_number(const char* key) const;
  std::vector<std::string> texts(const char* key) const;
  int64_t whole(const char* key, int64_t low, int64_t high) const;
  [[noreturn]] void fail(const std::string& what) const;

 private:
  const nlohmann::json& json_;
  std::string where_;
};

// body(line, where) for every line of a file that is not empty, where being FILE:LINE; the file plain or packed
// (train/byte_source.h). Throws Error(kUsage) for a line of more than 256 MiB and Stopped (base/stop.h); so does
// read_text() for a text of more than 1 GiB.
void for_each_line(const std::string& path,
                   const std::function<void(std::string_view line, const std::string& where)>& body);
// The whole of a file, unpacked.
std::string read_text(const std::string& path);

}  // namespace fw
