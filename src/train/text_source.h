// Texts as streams: what tokenization reads, without a whole file in memory. A plain file is one text, a file of JSON
// lines (.jsonl, .ndjson) one text a line; both also packed (byte_source.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fw {

class TextSource {
 public:
  virtual ~TextSource() = default;
  virtual const std::string& name() const = 0;  // the file, for errors
  // Goes to the next text, the first at the first call, past what was not read of the one before; false: there is none.
  virtual bool next() = 0;
  // The next bytes of this text, as many as fit where they are there; 0: its end. Errors are those of ByteSource, and
  // of JSON lines Error(kUsage) naming file and line.
  virtual size_t read(std::span<char> out) = 0;
};

// What is read of JSON lines.
struct LineRules {
  LineRules() = default;
  LineRules(std::string key)
      : field(std::move(key)) {}              // NOLINT(google-explicit-constructor): mostly nothing else is said
  LineRules(const char* key) : field(key) {}  // NOLINT(google-explicit-constructor)

  std::string field = "text";  // the key whose string is the text
  bool has_option = true;      // whether --field names that key: errors advise it
  // Gets "FILE:LINE: why" of a line that is no JSON object with a string of this key; the line is left out. Null: it is
  // an Error(kUsage).
  std::function<void(const std::string&)> on_bad;
  std::string advice;  // after that error: what leaves such lines out
};

// Lines have at most 256 MiB. NaN, Infinity and numbers beyond a double are taken where nobody reads them, as Python
// writes them. Errors are those of open_bytes.
std::unique_ptr<TextSource> open_text(const std::string& path, const LineRules& lines = {});
// A text in memory, which must outlive the source.
std::unique_ptr<TextSource> text_in_memory(std::string_view text, const std::string& name = "text");

// Whether open_text reads JSON lines from a file of this name.
bool is_json_lines(const std::string& path);

// The files that a pattern of the shell (*, ?, [...]) stands for, sorted by name; a path without these characters and
// the name of a file that is there stand for themselves. Error(kUsage) when there are none.
std::vector<std::string> expand_glob(const std::string& pattern);

}  // namespace fw
