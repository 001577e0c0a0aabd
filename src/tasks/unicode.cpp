#include "tasks/unicode.h"

#include <unicode/brkiter.h>
#include <unicode/regex.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/ustring.h>

#include <memory>

#include "base/error.h"

namespace fw {
namespace {

icu::UnicodeString wide(std::string_view text) {
  if (text.size() > size_t{1} << 30)
    fail_usage("a text of {} bytes: expected at most 1 GiB where it is taken apart as Unicode", text.size());
  return icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int32_t>(text.size())));
}

std::string narrow(const icu::UnicodeString& text) {
  std::string out;
  text.toUTF8String(out);
  return out;
}

bool is_space(UChar32 c) {
  const auto direction = u_charDirection(c);
  return u_charType(c) == U_SPACE_SEPARATOR || direction == U_WHITE_SPACE_NEUTRAL || direction == U_BLOCK_SEPARATOR ||
         direction == U_SEGMENT_SEPARATOR;
}

// body(character, begin, end) for every character of the text, by bytes.
template <class Body>
void for_each_character(std::string_view text, const Body& body) {
  const auto length = static_cast<int32_t>(text.size());
  for (int32_t i = 0; i < length;) {
    const int32_t begin = i;
    UChar32 c = 0;
    U8_NEXT_OR_FFFD(text.data(), i, length, c);
    body(c, static_cast<size_t>(begin), static_cast<size_t>(i));
  }
}

}  // namespace

std::vector<std::string> sentences_of(std::string_view text) {
  UErrorCode error = U_ZERO_ERROR;
  const std::unique_ptr<icu::BreakIterator> breaks(
      icu::BreakIterator::createSentenceInstance(icu::Locale::getEnglish(), error));
  if (U_FAILURE(error)) fail_internal("ICU has no rules for sentences: {}", u_errorName(error));
  const icu::UnicodeString whole = wide(text);
  breaks->setText(whole);
  std::vector<std::string> sentences;
  for (int32_t begin = breaks->first(), end = breaks->next(); end != icu::BreakIterator::DONE;
       begin = end, end = breaks->next()) {
    const std::string sentence = narrow(whole.tempSubStringBetween(begin, end));
    if (const std::string_view inside = stripped(sentence); !inside.empty()) sentences.emplace_back(inside);
  }
  return sentences;
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  size_t begin = 0;
  bool inside = false;
  for_each_character(text, [&](UChar32 c, size_t at, size_t) {
    if (is_space(c)) {
      if (inside) words.push_back(text.substr(begin, at - begin));
      inside = false;
    } else if (!inside) {
      inside = true;
      begin = at;
    }
  });
  if (inside) words.push_back(text.substr(begin));
  return words;
}

int64_t code_points(std::string_view text) {
  int64_t count = 0;
  for_each_character(text, [&](UChar32, size_t, size_t) { ++count; });
  return count;
}

std::string lower_case(std::string_view text) { return narrow(wide(text).toLower(icu::Locale::getRoot())); }

std::string capitalized(std::string_view text) {
  const icu::UnicodeString whole = wide(text);
  const int32_t first = whole.moveIndex32(0, 1);
  return narrow(icu::UnicodeString(whole, 0, first).toTitle(nullptr, icu::Locale::getRoot()) +
                icu::UnicodeString(whole, first).toLower(icu::Locale::getRoot()));
}

bool contains_ignoring_case(std::string_view text, std::string_view part) {
  return lower_case(text).find(lower_case(part)) != std::string::npos;
}

std::string replaced(std::string_view text, const char* pattern, const char* replacement) {
  UErrorCode error = U_ZERO_ERROR;
  const icu::UnicodeString whole = wide(text);
  icu::RegexMatcher matcher(icu::UnicodeString::fromUTF8(pattern), whole, 0, error);
  matcher.setStackLimit(0, error);  // long pages: no limit but memory
  const icu::UnicodeString result = matcher.replaceAll(icu::UnicodeString::fromUTF8(replacement), error);
  if (U_FAILURE(error)) fail_internal("the regular expression '{}': {}", pattern, u_errorName(error));
  return narrow(result);
}

size_t trailing_space(std::string_view text) {
  size_t solid = 0;
  for_each_character(text, [&](UChar32 c, size_t, size_t end) {
    if (!is_space(c)) solid = end;
  });
  return text.size() - solid;
}

std::string_view stripped(std::string_view text) {
  text.remove_suffix(trailing_space(text));
  size_t begin = text.size();
  for_each_character(text, [&](UChar32 c, size_t at, size_t) {
    if (!is_space(c) && at < begin) begin = at;
  });
  return text.substr(begin);
}

int64_t pieces_between_space(std::string_view text) {
  int64_t runs = 0;
  bool space = false;
  for_each_character(text, [&](UChar32 c, size_t, size_t) {
    runs += is_space(c) && !space;
    space = is_space(c);
  });
  return runs + 1;
}

}  // namespace fw
