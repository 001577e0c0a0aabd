#include "tasks/json_fields.h"

#include "base/error.h"
#include "base/keys.h"
#include "base/stop.h"
#include "train/byte_source.h"

namespace fw {
namespace {

// Whatever a small file unpacks to.
constexpr size_t kMostText = size_t{1} << 30, kLongestLine = size_t{256} << 20;

}  // namespace

JsonFields::JsonFields(const nlohmann::json& json, std::string where) : json_(json), where_(std::move(where)) {
  if (!json.is_object()) fail(fmt::format("expected a JSON object, got {}", shown(json)));
}

void JsonFields::fail(const std::string& what) const { fail_usage("{}: {}", where_, what); }

const nlohmann::json& JsonFields::at(const char* key) const {
  const auto found = json_.find(key);
  if (found == json_.end()) fail(fmt::format("the key \"{}\" is missing", key));
  return *found;
}

std::string JsonFields::text(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_string()) fail(fmt::format("{}: expected a string, got {}", key, shown(value)));
  return value.get<std::string>();
}

std::string JsonFields::text_or_number(const char* key) const {
  const nlohmann::json& value = at(key);
  return value.is_number_integer() ? value.dump() : text(key);
}

std::vector<std::string> JsonFields::texts(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_array()) fail(fmt::format("{}: expected an array of strings, got {}", key, shown(value)));
  std::vector<std::string> texts;
  texts.reserve(value.size());
  for (const nlohmann::json& one : value) {
    if (!one.is_string()) fail(fmt::format("{}: expected an array of strings, got {} in it", key, shown(one)));
    texts.push_back(one.get<std::string>());
  }
  return texts;
}

int64_t JsonFields::whole(const char* key, int64_t low, int64_t high) const {
  const nlohmann::json& value = at(key);
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(high)
                                               : value.is_number_integer() && value.get<int64_t>() <= high;
  if (!fits || value.get<int64_t>() < low)
    fail(fmt::format("{}: expected a whole number from {} to {}, got {}", key, low, high, shown(value)));
  return value.get<int64_t>();
}

std::string read_text(const std::string& path) {
  const std::unique_ptr<ByteSource> bytes = open_bytes(path);
  std::string text;
  std::vector<char> piece(size_t{1} << 16);
  while (const size_t n = bytes->read(piece)) {
    stop_point("reading", static_cast<int64_t>(text.size()), -1, "bytes");
    if (text.size() + n > kMostText)
      fail_usage("'{}': expected a text of at most {} MiB, unpacked, it has more: cut it", path, kMostText >> 20);
    text.append(piece.data(), n);
  }
  return text;
}

void for_each_line(const std::string& path,
                   const std::function<void(std::string_view line, const std::string& where)>& body) {
  const std::unique_ptr<ByteSource> bytes = open_bytes(path);
  std::vector<char> piece(size_t{1} << 16);
  std::string line;
  int64_t number = 0;
  const auto take = [&] {
    ++number;
    stop_point("reading", number, -1, "lines");
    if (line.find_first_not_of(" \t\r") != std::string::npos) body(line, fmt::format("{}:{}", path, number));
    line.clear();
  };
  while (const size_t n = bytes->read(piece)) {
    std::string_view rest(piece.data(), n);
    for (size_t end; (end = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(end + 1)) {
      line += rest.substr(0, end);
      take();
    }
    if (line.size() + rest.size() > kLongestLine) {
      fail_usage("{}:{}: expected lines of at most {} MiB, this one is longer", path, number + 1, kLongestLine >> 20);
    }
    line += rest;
  }
  if (!line.empty()) take();
}

}  // namespace fw
