// How a tokenizer.json makes text of tokens: ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, BPEDecoder,
// WordPiece and sequences of these. Others are refused by name.
#pragma once

#include <string>
#include <vector>

#include "tokenizer/json_part.h"
#include "tokenizer/pattern.h"

namespace fw {

class TokenDecoder {
 public:
  TokenDecoder() = default;  // tokens with spaces between
  explicit TokenDecoder(const JsonPart& part);

  // The bytes that the tokens stand for. Bytes that are no UTF-8 stay what they are.
  std::string decode(std::vector<std::string> tokens) const;
  // Those of one token in the middle of others; what a decoder takes from the beginning of a text is there. `first`: a
  // token that begins a text, where a decoder puts a space between words.
  std::string piece(const std::string& token, bool first, TextBudget& budget) const;

 private:
  enum class Kind { kByteLevel, kByteFallback, kFuse, kMetaspace, kReplace, kStrip, kBpe, kWordPiece };
  struct Step {
    Kind kind;
    Pattern pattern;  // kReplace
    // kReplace: what comes instead; kMetaspace, kStrip: the character; kBpe: the suffix; kWordPiece: the prefix
    std::string text;
    int64_t start = 0, stop = 0;  // kStrip
    bool prefix = false;          // kMetaspace: takes marks from the first token; kWordPiece: cleans up English
  };
  void add(const JsonPart& part);

  bool given_ = false;
  std::vector<Step> steps_;
};

}  // namespace fw
