// The patterns of tokenizer.json: a text, or a regular expression. Regular expressions run on Oniguruma with the syntax
// and options of the `tokenizers` package, so every construct means the same. Debian 12's Oniguruma 6.9.8 knows Unicode
// 14, the package 0.23 Unicode 16: characters of later versions differ.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_part.h"
#include "tokenizer/text_budget.h"

struct re_pattern_buffer;  // Oniguruma's regex_t

namespace fw {

struct Span {
  size_t begin = 0, end = 0;  // bytes
  bool match = false;
};

class Pattern {
 public:
  // {"String": "..."} or {"Regex": "..."}.
  static Pattern from_json(const JsonPart& part);
  // A pattern of this program; a mistake in one is a defect.
  static Pattern of_program(const char* pattern);

  const std::string& source() const { return source_; }  // as it was written; "" of a text
  bool is_regex() const { return regex_ != nullptr; }

 private:
  friend class PatternScan;
  std::string source_, literal_;
  std::shared_ptr<re_pattern_buffer> regex_;
};

// One use of a pattern, by one thread: what it needs for a text is kept for the next.
class PatternScan {
 public:
  PatternScan(const Pattern& pattern, TextBudget& budget);
  ~PatternScan();
  PatternScan(const PatternScan&) = delete;
  PatternScan& operator=(const PatternScan&) = delete;

  // Valid UTF-8 as matches and what lies between them, in order, nothing left out; nothing of an empty text.
  void cut(std::string_view text, std::vector<Span>& spans);

 private:
  struct Engine;
  void find(std::string_view text);                  // fills found_ with matches, bytes
  bool search(std::string_view text, size_t begin);  // the first match from a byte on: engine_ has it

  const Pattern& pattern_;
  TextBudget& budget_;
  std::unique_ptr<Engine> engine_;
  std::vector<Span> found_;
};

}  // namespace fw
