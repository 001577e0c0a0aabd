// PromptLookup: drafts of the next tokens from the text itself. Where the last three tokens, or else the last two, came
// before, what followed them there may follow again.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace fw {

class PromptLookup {
 public:
  void add(std::span<const int32_t> ids);
  // What may follow the text and `next`: `count` tokens, or none where the last two never came before. Of several
  // places it is the last one.
  std::vector<int32_t> draft(int32_t next, int64_t count) const;
  const std::vector<int32_t>& text() const { return text_; }

 private:
  std::vector<int32_t> text_;
  // A pair of neighbouring tokens is named by the index of its second one.
  std::unordered_map<uint64_t, int64_t> last_;  // the last place of a pair
  std::vector<int64_t> before_;                 // [text]: the place of the same pair before this one; -1: none
};

}  // namespace fw
