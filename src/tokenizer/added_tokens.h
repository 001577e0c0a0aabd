// The added tokens of a tokenizer.json ("<|endoftext|>"): found in the text before anything else, those that are not normalised in the text as it is, the
// others in what the normalizer makes of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

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
  void add(const AddedToken& token, std::string_view pattern);
  bool empty() const { return tokens_.empty(); }
  // The text as tokens and what lies between. Valid UTF-8.
  void cut(std::string_view text, std::vector<Part>& parts) const;

 private:
  // Token at the start of a text, by its length: {-1, 0} where there is none.
  std::pair<int32_t, size_t> longest(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<uint64_t, uint32_t> next_;  // node and byte -> node
  std::vector<int32_t> ends_{-1};                // of a node: the token that ends there
  std::array<bool, 256> begins_{};
};

}  // namespace fw
