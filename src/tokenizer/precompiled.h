// The normalizer "Precompiled": SentencePiece's table of what becomes of which characters (`precompiled_charsmap`,
// base64). A number of 4 bytes says how long a double array is, a trie whose values are places in the texts after it,
// each ended by a NUL.
//
// A text goes cluster by cluster (Unicode's grapheme clusters): one of fewer than 6 bytes is replaced as a whole by
// what the shortest of its beginnings in the table becomes, any other character by character. So the `tokenizers`
// package has it, and models were trained with it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_part.h"

namespace fw {

class Precompiled {
 public:
  // part: the string. Throws Error(kUsage) by file and place for what is no base64, no table, or has texts that are no
  // UTF-8.
  explicit Precompiled(const JsonPart& part);
  // Valid UTF-8. `head`: how many bytes stand for the first character of the whole text, before and afterwards.
  std::string apply(std::string_view text, size_t& head) const;

 private:
  std::optional<std::string_view> replacement(std::string_view part) const;
  void cluster(std::string_view text, std::string& out) const;
  void character(std::string_view text, std::string& out) const;

  std::vector<uint32_t> units_;
  std::string texts_;
};

}  // namespace fw
