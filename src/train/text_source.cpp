#include "train/text_source.h"

#include <glob.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/python_json.h"
#include "train/byte_source.h"

namespace fw {
namespace {

class FileText final : public TextSource {
 public:
  explicit FileText(const std::string& path) : path_(path), bytes_(open_bytes(path)) {}
  const std::string& name() const override { return path_; }
  bool next() override { return !std::exchange(begun_, true); }
  size_t read(std::span<char> out) override { return bytes_->read(out); }

 private:
  std::string path_;
  std::unique_ptr<ByteSource> bytes_;
  bool begun_ = false;
};

class MemoryText final : public TextSource {
 public:
  MemoryText(std::string_view text, const std::string& name) : name_(name), remaining_(text) {}
  const std::string& name() const override { return name_; }
  bool next() override { return !std::exchange(begun_, true); }
  size_t read(std::span<char> out) override {
    const size_t n = std::min(out.size(), remaining_.size());
    if (n > 0) std::memcpy(out.data(), remaining_.data(), n);
    remaining_.remove_prefix(n);
    return n;
  }

 private:
  std::string name_;
  std::string_view remaining_;
  bool begun_ = false;
};

// One string of a JSON object, found without building the object: what else is in a line costs no memory, and however
// deep it is nested nothing recurses.
class FieldReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  FieldReader(std::string_view field, std::string* text) : field_(field), text_(text) {}
  bool found() const { return found_; }
  bool object() const { return object_; }
  const std::string& problem() const { return problem_; }
  bool not_json() const { return not_json_; }

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool string(string_t& s) override {
    if (depth_ == 1 && wanted_) {
      *text_ = std::move(s);
      found_ = true;
      wanted_ = false;
      return true;
    }
    return value();
  }
  bool key(string_t& k) override {
    if (depth_ == 1) wanted_ = k == field_;
    return true;
  }
  bool start_object(size_t) override { return open(true); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(false); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    not_json_ = true;
    problem_ = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 3: what": the line within one line says nothing.
    const size_t column = problem_.find("column");
    if (column != std::string::npos) problem_.erase(0, column);
    constexpr size_t kLongest = 160;  // it repeats what was read last, which can be the whole line
    if (problem_.size() > kLongest) problem_ = problem_.substr(0, kLongest) + "...";
    return false;
  }

 private:
  bool value() {
    if (depth_ == 1 && wanted_) problem_ = fmt::format("\"{}\" is not a string", field_);
    return problem_.empty();
  }
  bool open(bool is_object) {
    if (depth_ == 0) object_ = is_object;
    if (!value()) return false;
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  std::string_view field_;
  std::string* text_;
  std::string problem_;
  size_t depth_ = 0;
  bool found_ = false, object_ = false, wanted_ = false, not_json_ = false;
};

class JsonLines final : public TextSource {
 public:
  JsonLines(const std::string& path, const LineRules& rules)
      : path_(path), rules_(rules), bytes_(open_bytes(path)), buffer_(size_t{1} << 17) {}
  const std::string& name() const override { return path_; }

  bool next() override {
    while (next_line()) {
      ++number_;
      if (line_.find_first_not_of(" \t\r") == std::string::npos) continue;
      const std::string problem = parse();
      if (problem.empty()) return true;
      const std::string where = fmt::format("{}:{}: {}", path_, number_, problem);
      if (!rules_.on_bad) fail_usage("{}{}", where, rules_.advice);
      rules_.on_bad(where);
    }
    text_.clear();
    return false;
  }

  size_t read(std::span<char> out) override {
    const size_t n = std::min(out.size(), text_.size() - at_);
    if (n > 0) std::memcpy(out.data(), text_.data() + at_, n);
    at_ += n;
    return n;
  }

 private:
  // The next line without its end; false after the last.
  bool next_line() {
    line_.clear();
    for (bool any = false;; any = true) {
      if (remaining_.empty()) {
        remaining_ = std::span(buffer_).first(bytes_->read(buffer_));
        if (remaining_.empty()) return any && !line_.empty();
      }
      const auto* end = static_cast<const char*>(std::memchr(remaining_.data(), '\n', remaining_.size()));
      const size_t length = end != nullptr ? static_cast<size_t>(end - remaining_.data()) : remaining_.size();
      if (line_.size() + length > kLongestLine) {
        fail_usage("{}:{}: expected lines of JSON of at most {} MiB, this one is longer", path_, number_ + 1,
                   kLongestLine >> 20);
      }
      line_.append(remaining_.data(), length);
      remaining_ = remaining_.subspan(end != nullptr ? length + 1 : length);
      if (end != nullptr) return true;
    }
  }

  // What is wrong with the line; "" when it has a text.
  std::string parse() {
    text_.clear();
    at_ = 0;
    FieldReader reader(rules_.field, &text_);
    bool parsed = nlohmann::json::sax_parse(line_, &reader);
    if (!parsed && reader.not_json()) {
      // Perhaps it is as Python writes it.
      const std::string strict = without_python_numbers(line_);
      if (strict != line_) {
        reader = FieldReader(rules_.field, &text_);
        parsed = nlohmann::json::sax_parse(strict, &reader);
      }
    }
    if (!parsed && reader.not_json()) return fmt::format("not valid JSON: {}", reader.problem());
    const std::string_view advice = rules_.has_option ? "; --field names the string that is the text" : "";
    if (!parsed) return fmt::format("{}{}", reader.problem(), advice);
    if (!reader.object()) return "expected a JSON object a line, got another value";
    if (!reader.found()) return fmt::format("no key \"{}\" in this line{}", rules_.field, advice);
    return {};
  }

  static constexpr size_t kLongestLine = size_t{256} << 20;
  std::string path_;
  LineRules rules_;
  std::unique_ptr<ByteSource> bytes_;
  std::vector<char> buffer_;
  std::span<char> remaining_;
  std::string line_, text_;
  size_t at_ = 0;
  int64_t number_ = 0;
};

}  // namespace

bool is_json_lines(const std::string& path) {
  std::string_view name = path;
  for (const std::string_view packed : {".gz", ".zst"}) {
    if (name.ends_with(packed)) {
      name.remove_suffix(packed.size());
      break;
    }
  }
  return name.ends_with(".jsonl") || name.ends_with(".ndjson");
}

std::unique_ptr<TextSource> open_text(const std::string& path, const LineRules& lines) {
  if (is_json_lines(path)) return std::make_unique<JsonLines>(path, lines);
  return std::make_unique<FileText>(path);
}

std::unique_ptr<TextSource> text_in_memory(std::string_view text, const std::string& name) {
  return std::make_unique<MemoryText>(text, name);
}

std::vector<std::string> expand_glob(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos || file_exists(pattern)) return {pattern};
  glob_t found = {};
  const int status = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
  if (status == GLOB_ABORTED) fail_usage("'{}': a folder of this pattern cannot be read", pattern);
  if (paths.empty()) fail_usage("'{}': no file matches this pattern", pattern);
  std::sort(paths.begin(), paths.end());  // by bytes: the locale's order is not the same everywhere
  return paths;
}

}  // namespace fw
