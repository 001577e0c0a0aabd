// How many bytes of a text each of its tokens stands for: what bits per byte count. A token's piece is often not a part
// of the text: normalizers change characters, a tokenizer puts a space before a text or drops some, and an unknown
// token stands for anything.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace fw {

class TextBytes {
 public:
  // The tokenizer must outlive it.
  explicit TextBytes(const Tokenizer& tokenizer);

  // Whether the tokens are of a text at all. Ids written as numbers are not: the text after them is not there.
  bool known() const { return known_; }
  // Bytes of a token's piece, which is what the token stands for unless measure() says otherwise.
  int64_t piece(int32_t id) const { return static_cast<int64_t>(text_of(id).size()); }
  // Whether the piece is space and nothing else.
  bool is_space(int32_t id) const;

  // bytes[i] becomes the bytes that ids[i] stands for, where ids are those of encode(text). Their sum is text.size(),
  // if there are ids. Pieces are matched with the text: exactly where they are equal, else by the least costly
  // alignment of characters, compared without case, accents and form. Bytes that belong to no piece are those of the
  // token before them, at the beginning those of the first token.
  void measure(std::string_view text, std::span<const int32_t> ids, std::vector<int64_t>& bytes) const;

 private:
  const std::string& text_of(int32_t id) const;

  const Tokenizer& tokenizer_;
  std::vector<std::string> pieces_;                             // of vocabularies of an ordinary size
  mutable std::unordered_map<int32_t, std::string> looked_up_;  // of others
  bool known_, bytes_;
};

}  // namespace fw
