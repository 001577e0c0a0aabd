// The patterns of tokenizer.json: a text, or a regular expression. Those are written for Oniguruma (Ruby's syntax) and run on ICU's engine, translated where
// the two read the same words differently. The newest characters differ: ICU 72 knows Unicode 15, the `tokenizers` package 0.23 Unicode 16.
#pragma once

#include <unicode/regex.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_part.h"

namespace fw {

struct Span {
  size_t begin = 0, end = 0;  // bytes
  bool match = false;
};

class Pattern {
 public:
  // {"String": "..."} or {"Regex": "..."}.
  static Pattern from_json(const JsonPart& part);
  // In ICU's own words; a mistake in one is a defect.
  static Pattern of_icu(const char* pattern);

  const std::string& source() const { return source_; }  // as it was written; "" of a text
  bool is_regex() const { return regex_ != nullptr; }

 private:
  friend class PatternScan;
  std::string source_, literal_;
  std::shared_ptr<const icu::RegexPattern> regex_;
};

// One use of a pattern, by one thread: what it needs for a text is kept for the next.
class PatternScan {
 public:
  explicit PatternScan(const Pattern& pattern);
  // Valid UTF-8 as matches and what lies between them, in order, nothing left out; nothing of an empty text.
  void cut(std::string_view text, std::vector<Span>& spans);

 private:
  void find(std::string_view text);  // fills found_ with matches, bytes

  const Pattern& pattern_;
  std::unique_ptr<icu::RegexMatcher> matcher_;
  icu::UnicodeString wide_;
  std::vector<Span> found_;
};

}  // namespace fw
