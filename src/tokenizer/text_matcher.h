// Finds, for every place of a text, the longest of many words that begins there (Aho-Corasick on words and text read
// from right to left). The work grows with the text and with what is found, however long and alike the words are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fw {

class TextMatcher {
 public:
  struct Found {
    size_t begin = 0;
    uint32_t length = 0;
    int32_t value = -1;
    uint32_t shorter = 0;  // for next_shorter()
  };

  TextMatcher() = default;
  // Words and their values. Of equal words the first counts; an empty one is never found.
  explicit TextMatcher(const std::vector<std::pair<std::string_view, int32_t>>& words);

  // Places at which a word begins, from the last of the text to its first.
  void find(std::string_view text, std::vector<Found>& found) const;
  // The next shorter word that begins at the same place; false where there is none.
  bool next_shorter(Found& found) const;

 private:
  struct Node {
    uint32_t failure = 0;  // the node of the longest other end of what has been read
    uint32_t length = 0;   // of the longest word that ends here, 0: none
    int32_t value = -1;    // its value
    uint32_t shorter = 0;  // a node with the next shorter word that ends here, 0: none
  };
  struct EdgeHash {
    size_t operator()(uint64_t edge_key) const {
      return static_cast<size_t>((edge_key ^ edge_key >> 31) * 0x9e3779b97f4a7c15u >> 5);
    }
  };
  static uint64_t edge_key(uint32_t node, char c) { return uint64_t{node} << 8 | static_cast<unsigned char>(c); }
  uint32_t next(uint32_t node, char c) const;

  std::vector<Node> nodes_{Node{}};
  std::unordered_map<uint64_t, uint32_t, EdgeHash> children_;
  std::array<uint32_t, 256> first_{};  // children of the root, 0: none
};

}  // namespace fw
