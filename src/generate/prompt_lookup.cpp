#include "generate/prompt_lookup.h"

namespace fw {
namespace {

// Places of a pair that are looked at for the token in front of it, so that a draft costs the same in long texts.
constexpr int kMostOccurrences = 64;

uint64_t pair_of(int32_t first, int32_t second) {
  return uint64_t{static_cast<uint32_t>(first)} << 32 | static_cast<uint32_t>(second);
}

}  // namespace

void PromptLookup::add(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    const auto at = static_cast<int64_t>(text_.size());
    text_.push_back(id);
    before_.push_back(-1);
    if (at == 0) continue;
    const auto [found, is_new] = last_.try_emplace(pair_of(text_[static_cast<size_t>(at) - 1], id), at);
    if (is_new) continue;
    before_.back() = found->second;
    found->second = at;
  }
}

std::vector<int32_t> PromptLookup::draft(int32_t next, int64_t count) const {
  if (text_.empty()) return {};
  const auto found = last_.find(pair_of(text_.back(), next));
  if (found == last_.end()) return {};
  int64_t pos = found->second;
  int64_t at = pos;
  for (int i = 0; i < kMostOccurrences && at >= 2; ++i, at = before_[static_cast<size_t>(at)]) {
    if (text_.size() < 2 || text_[static_cast<size_t>(at) - 2] != text_[text_.size() - 2]) continue;
    pos = at;
    break;
  }
  // A place near the end goes on with the draft itself: the text repeats.
  std::vector<int32_t> drafts;
  for (int64_t i = 0; i < count; ++i) {
    const size_t from = static_cast<size_t>(pos + 1 + i);
    drafts.push_back(from < text_.size() ? text_[from] : from == text_.size() ? next : drafts[from - text_.size() - 1]);
  }
  return drafts;
}

}  // namespace fw
