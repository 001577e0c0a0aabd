#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "base/error.h"
#include "tokenizer/unicode_classes.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

char32_t character_before(std::string_view text, size_t end, size_t* begin) {
  size_t at = end - 1;
  while ((static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u) --at;
  *begin = at;
  return utf8_next(text, at);
}

bool alone(std::string_view text, size_t begin, size_t end) {
  size_t unused = 0;
  if (begin > 0 && is_word(character_before(text, begin, &unused))) return false;
  size_t at = end;
  return end == text.size() || !is_word(utf8_next(text, at));
}

}  // namespace

void AddedTokens::add(const AddedToken& token, std::string pattern) {
  if (pattern.empty()) return;
  tokens_.push_back(token);
  patterns_.push_back(std::move(pattern));
}

void AddedTokens::finish() {
  std::vector<std::pair<std::string_view, int32_t>> words;
  words.reserve(patterns_.size());
  for (size_t i = 0; i < patterns_.size(); ++i) words.emplace_back(patterns_[i], static_cast<int32_t>(i));
  matcher_ = TextMatcher(words);
}

void AddedTokens::cut(std::string_view text, std::vector<Part>& parts) const {
  parts.clear();
  if (text.empty()) return;
  std::vector<TextMatcher::Found> found;
  matcher_.find(text, found);
  size_t done = 0, next = 0;                  // the end of the last token, and where the next one may begin
  size_t space_begin = 0, space_end = 0;      // white space that was looked through
  for (; !found.empty(); found.pop_back()) {  // the first of the text is the last of the list
    const TextMatcher::Found& match = found.back();
    if (match.begin < next) continue;
    const AddedToken& token = tokens_[static_cast<size_t>(match.value)];
    size_t begin = match.begin, end = match.begin + match.length;
    next = end;
    if (token.single_word && !alone(text, begin, end)) continue;
    if (token.lstrip) {
      for (size_t before = 0; begin > done && is_space(character_before(text, begin, &before));) begin = before;
    }
    if (token.rstrip) {
      if (end < space_begin || end > space_end) {
        space_begin = space_end = end;
        for (size_t behind = end; space_end < text.size() && is_space(utf8_next(text, behind));) space_end = behind;
      }
      end = space_end;
    }
    // A token before may have taken space that begins or holds this one.
    if (token.lstrip) begin = std::max(begin, done);
    if (begin > end) {
      fail_usage(
          "the added token '{}' stands in the white space that the token before it takes (rstrip), and takes that "
          "space itself (lstrip): expected tokens "
          "of which one of both is off",
          utf8_start(token.content, 40));
    }
    if (done < begin) parts.push_back({text.substr(done, begin - done)});
    // of white space that is taken whole nothing is left
    if (begin < end) parts.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({text.substr(done)});
}

}  // namespace fw
