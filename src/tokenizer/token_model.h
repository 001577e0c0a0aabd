// The models of a tokenizer.json: a piece of text to ids. Byte-level and other BPE, Unigram, WordPiece and WordLevel;
// others are refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/json_part.h"

namespace fw {

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

// Tokens and their ids, which may leave ids out.
class Vocabulary {
 public:
  void add(std::string token, int32_t id);  // of a token that is there: the id becomes this one
  int32_t find(std::string_view token) const;
  const std::string* token(int32_t id) const;  // null: the id has none
  int32_t count() const { return static_cast<int32_t>(ids_.size()); }
  int32_t end() const { return static_cast<int32_t>(tokens_.size()); }  // the largest id, and one

 private:
  std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>> ids_;
  std::vector<const std::string*> tokens_;  // keys of ids_
};

class TokenModel {
 public:
  virtual ~TokenModel() = default;
  // Appends the ids of valid UTF-8 that is not empty.
  virtual void encode(std::string_view piece, std::vector<int32_t>& ids) const = 0;
  const Vocabulary& vocabulary() const { return vocabulary_; }
  // Entries of the file's list, as the first id of tokens that are not among them is counted.
  virtual int32_t size() const { return vocabulary_.count(); }

 protected:
  // Ids of <0x00> to <0xFF> for the bytes of a text; false, and nothing appended, where one is missing.
  bool byte_pieces(std::string_view text, std::vector<int32_t>& ids) const;
  Vocabulary vocabulary_;
};

std::unique_ptr<TokenModel> token_model(const JsonPart& part);
// Of token_model().
std::unique_ptr<TokenModel> bpe_model(const JsonPart& part);
std::unique_ptr<TokenModel> unigram_model(const JsonPart& part);
std::unique_ptr<TokenModel> word_piece_model(const JsonPart& part);
std::unique_ptr<TokenModel> word_level_model(const JsonPart& part);

}  // namespace fw
