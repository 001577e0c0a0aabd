#include "tokenizer/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>

#include "tokenizer/utf8.h"

namespace fw {
namespace {

// \w of Rust's regular expressions.
bool is_word(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  return u_hasBinaryProperty(u, UCHAR_ALPHABETIC) != 0 || (U_GET_GC_MASK(u) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0 || c == 0x200c || c == 0x200d;
}

bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }

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

void AddedTokens::add(const AddedToken& token, std::string_view pattern) {
  if (pattern.empty()) return;
  uint32_t node = 0;
  for (const char c : pattern) {
    const auto [found, added] = next_.try_emplace(uint64_t{node} << 8 | static_cast<unsigned char>(c), static_cast<uint32_t>(ends_.size()));
    if (added) ends_.push_back(-1);
    node = found->second;
  }
  if (ends_[node] >= 0) return;
  ends_[node] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
  begins_[static_cast<unsigned char>(pattern[0])] = true;
}

std::pair<int32_t, size_t> AddedTokens::longest(std::string_view text) const {
  std::pair<int32_t, size_t> best{-1, 0};
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto found = next_.find(uint64_t{node} << 8 | static_cast<unsigned char>(text[i]));
    if (found == next_.end()) break;
    node = found->second;
    if (ends_[node] >= 0) best = {ends_[node], i + 1};
  }
  return best;
}

void AddedTokens::cut(std::string_view text, std::vector<Part>& parts) const {
  parts.clear();
  if (text.empty()) return;
  size_t done = 0;
  for (size_t i = 0; !tokens_.empty() && i < text.size();) {
    if (!begins_[static_cast<unsigned char>(text[i])]) {
      ++i;
      continue;
    }
    const auto [index, length] = longest(text.substr(i));
    if (index < 0) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = i, end = i + length;
    i = end;
    if (token.single_word && !alone(text, begin, end)) continue;
    if (token.lstrip) {
      for (size_t before = 0; begin > 0 && is_space(character_before(text, begin, &before));) begin = before;
      begin = std::max(begin, done);  // a token before may have taken the space
    }
    if (token.rstrip) {
      for (size_t behind = end; end < text.size() && is_space(utf8_next(text, behind));) end = behind;
    }
    if (done < begin) parts.push_back({text.substr(done, begin - done)});
    parts.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({text.substr(done)});
}

}  // namespace fw
