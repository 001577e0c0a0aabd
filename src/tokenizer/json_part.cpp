#include "tokenizer/json_part.h"

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

// Enough of a value to find it again.
std::string shown_part(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > 60) text = std::string(utf8_start(text, 57)) + "...";
  return text;
}

}  // namespace

void JsonPart::fail(std::string_view words) const {
  fail_usage("'{}': {}{}{}", file_, location_.empty() ? "" : location_, location_.empty() ? "" : ": ", words);
}

void JsonPart::refuse(std::string_view expected) const {
  fail(fmt::format("expected {}, got {}", expected, shown_part(*value_)));
}

void JsonPart::expect_object() const {
  if (!value_->is_object()) refuse("an object");
}

void JsonPart::expect_array() const {
  if (!value_->is_array()) refuse("an array");
}

bool JsonPart::has(const char* key) const {
  expect_object();
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonPart JsonPart::at(const char* key) const {
  if (!has(key)) fail(fmt::format("expected the key \"{}\"", key));
  return {*value_->find(key), file_, location_.empty() ? key : fmt::format("{}.{}", location_, key)};
}

JsonPart JsonPart::element(size_t index) const {
  return {(*value_)[index], file_, fmt::format("{}[{}]", location_, index)};
}

std::vector<JsonPart> JsonPart::elements() const {
  expect_array();
  std::vector<JsonPart> parts;
  parts.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) parts.push_back(element(i));
  return parts;
}

const std::string& JsonPart::text() const {
  if (!value_->is_string()) refuse("a string");
  return value_->get_ref<const std::string&>();
}

std::string JsonPart::text_or(const char* key, const std::string& otherwise) const {
  return has(key) ? at(key).text() : otherwise;
}

bool JsonPart::flag_or(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  const JsonPart part = at(key);
  if (!part.value().is_boolean()) part.refuse("true or false");
  return part.value().get<bool>();
}

int64_t JsonPart::integer(int64_t least, int64_t most) const {
  const bool whole = value_->is_number_integer() &&
                     !(value_->is_number_unsigned() && value_->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (!whole || value_->get<int64_t>() < least || value_->get<int64_t>() > most)
    refuse(fmt::format("a whole number from {} to {}", least, most));
  return value_->get<int64_t>();
}

std::string JsonPart::character() const {
  const std::string& one = text();
  if (one.empty() || utf8_length(one) != one.size()) refuse("one character");
  return one;
}

}  // namespace fw
