#include "tokenizer/pattern.h"

#include <unicode/utypes.h>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

// Line ends are "\n" alone and ^ and $ know lines, as in Ruby.
constexpr uint32_t kFlags = UREGEX_MULTILINE | UREGEX_UNIX_LINES;
// What ICU calls time is 10,000 steps of its engine. A pattern that goes through all ways of matching is stopped; others take a few steps a byte.
constexpr size_t kTime = 500, kBytesOfTime = 100;
constexpr size_t kMostBytes = size_t{1} << 30;

// Ruby's words in ICU's. \w: ICU's has no numbers but decimal digits, and has the joiners.
std::string translated(const JsonPart& part, const std::string& pattern) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      out += pattern[i];
      continue;
    }
    const char c = pattern[++i];
    if (c == 'w') {
      out += "[\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}]";
    } else if (c == 'W') {
      out += "[^\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}]";
    } else if (std::string_view("bBhHRXKGgkyY").find(c) != std::string_view::npos) {
      part.fail(fmt::format("'\\{}' in a regular expression is not supported: it means something else to the engine that is used here (ICU)", c));
    } else {
      out += '\\';
      out += c;
    }
  }
  return out;
}

std::shared_ptr<const icu::RegexPattern> compiled(const std::string& pattern, UErrorCode& error) {
  UParseError where{};
  return std::shared_ptr<const icu::RegexPattern>(icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(pattern), kFlags, where, error));
}

}  // namespace

Pattern Pattern::from_json(const JsonPart& part) {
  Pattern result;
  if (part.has("String")) {
    const JsonPart text = part.at("String");
    result.literal_ = text.text();
    if (result.literal_.empty()) text.refuse("a text that is not empty");
    return result;
  }
  if (!part.has("Regex")) part.refuse("{\"String\": ...} or {\"Regex\": ...}");
  const JsonPart regex = part.at("Regex");
  result.source_ = regex.text();
  if (result.source_.size() > size_t{1} << 16) regex.refuse("a regular expression of at most 64 KiB");
  UErrorCode error = U_ZERO_ERROR;
  result.regex_ = compiled(translated(regex, result.source_), error);
  if (U_FAILURE(error)) regex.fail(fmt::format("expected a regular expression, ICU says {} of '{}'", u_errorName(error), result.source_.substr(0, 60)));
  return result;
}

Pattern Pattern::of_icu(const char* pattern) {
  Pattern result;
  UErrorCode error = U_ZERO_ERROR;
  result.source_ = pattern;
  result.regex_ = compiled(result.source_, error);
  if (U_FAILURE(error)) fail_internal("the regular expression '{}': {}", pattern, u_errorName(error));
  return result;
}

PatternScan::PatternScan(const Pattern& pattern) : pattern_(pattern) {
  if (!pattern_.is_regex()) return;
  UErrorCode error = U_ZERO_ERROR;
  matcher_.reset(pattern_.regex_->matcher(error));
  matcher_->setStackLimit(0, error);  // long texts: no limit but memory
  if (U_FAILURE(error)) fail_internal("a matcher of ICU: {}", u_errorName(error));
}

void PatternScan::find(std::string_view text) {
  found_.clear();
  if (!pattern_.is_regex()) {
    const std::string& wanted = pattern_.literal_;
    for (size_t at = text.find(wanted); at != std::string_view::npos; at = text.find(wanted, at + wanted.size()))
      found_.push_back({at, at + wanted.size(), true});
    return;
  }
  if (text.size() > kMostBytes) fail_usage("a text of {} bytes in one document: expected at most 1 GiB where a tokenizer's pattern cuts it", text.size());
  wide_ = icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int32_t>(text.size())));
  const bool ascii = static_cast<size_t>(wide_.length()) == text.size();
  UErrorCode error = U_ZERO_ERROR;
  matcher_->setTimeLimit(static_cast<int32_t>(kTime + text.size() / kBytesOfTime), error);
  matcher_->reset(wide_);
  size_t byte = 0;
  int32_t unit = 0;
  const auto bytes_at = [&](int32_t wanted) {  // positions only rise
    if (ascii) return static_cast<size_t>(wanted);
    while (unit < wanted) unit += utf8_next(text, byte) < 0x10000 ? 1 : 2;
    return byte;
  };
  int32_t last = -1;
  while (matcher_->find(error) != 0 && !U_FAILURE(error)) {
    const int32_t begin = matcher_->start(error), end = matcher_->end(error);
    if (begin == end && begin == last) continue;  // nothing, right behind a match
    last = end;
    const size_t from = bytes_at(begin);
    found_.push_back({from, bytes_at(end), true});
  }
  if (error == U_REGEX_TIME_OUT) {
    fail_usage("the tokenizer's regular expression '{}' takes too long on a text of {} bytes: it tries too many ways", pattern_.source_.substr(0, 60),
               text.size());
  }
  if (U_FAILURE(error))
    fail_usage("the tokenizer's regular expression '{}' fails on a text of {} bytes: {}", pattern_.source_.substr(0, 60), text.size(), u_errorName(error));
}

void PatternScan::cut(std::string_view text, std::vector<Span>& spans) {
  spans.clear();
  if (text.empty()) return;
  find(text);
  size_t end = 0;
  for (const Span& match : found_) {
    if (match.begin > end) spans.push_back({end, match.begin, false});
    spans.push_back(match);
    end = match.end;
  }
  if (end < text.size()) spans.push_back({end, text.size(), false});
}

}  // namespace fw
