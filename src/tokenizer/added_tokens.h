// The added tokens of a tokenizer.json ("<|endoftext|>"): found in the text before anything else, those that are not
// normalised in the text as it is, the others in what the normalizer makes of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/text_matcher.h"

namespace fw {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
};

// Finds the leftmost of some tokens, the longest where several begin, again and again.
class AddedTokens {
 public:
  struct Part {
    std::string_view text;
    int32_t id = -1;  // -1: text between tokens, not empty
  };

  // What is looked for is `pattern`; of equal ones the first counts. An empty one is never found.
  void add(const AddedToken& token, std::string pattern);
  void finish();  // after the last add(), before the first cut()
  bool empty() const { return tokens_.empty(); }
  // The text as tokens and what lies between. Valid UTF-8.
  void cut(std::string_view text, std::vector<Part>& parts) const;

 private:
  std::vector<AddedToken> tokens_;
  std::vector<std::string> patterns_;  // what is looked for, of each token
  TextMatcher matcher_;
};

}  // namespace fw
