// WordPiece: a piece is cut from its left into the longest tokens that there are, those behind the first with a prefix (##); one that cannot be cut so to its
// end, or is too long, is the unknown token. WordLevel: a piece is a token, or the unknown one.
#include "base/error.h"
#include "tokenizer/token_model.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

// What both have: tokens with ids of their own, and one for what is unknown.
class WholeWords : public TokenModel {
 protected:
  explicit WholeWords(const JsonPart& part, const char* unknown) {
    const JsonPart vocab = part.at("vocab");
    vocab.expect_object();
    for (const auto& [token, id] : vocab.value().items()) {
      if (!id.is_number_integer() || id < 0 || id > kMostIds) {
        vocab.fail(fmt::format("the token '{}': expected an id from 0 to {}, got {}", token, kMostIds, id.dump(-1, ' ', true).substr(0, 40)));
      }
      const int32_t value = id.get<int32_t>();
      if (const std::string* other = vocabulary_.token(value)) vocab.fail(fmt::format("the tokens '{}' and '{}' have the same id, {}", *other, token, value));
      vocabulary_.add(token, value);
    }
    if (vocabulary_.count() == 0) vocab.refuse("tokens and their ids");
    unknown_name_ = part.text_or("unk_token", unknown);
    unknown_ = vocabulary_.find(unknown_name_);
  }

  int32_t unknown(std::string_view piece) const {
    if (unknown_ < 0) {
      fail_usage("the tokenizer has no token for '{}', and its unk_token '{}' is not in its vocabulary", piece.substr(0, utf8_prefix(piece.substr(0, 40))),
                 unknown_name_);
    }
    return unknown_;
  }

 private:
  static constexpr int32_t kMostIds = 1 << 24;
  std::string unknown_name_;
  int32_t unknown_ = -1;
};

class WordPiece final : public WholeWords {
 public:
  explicit WordPiece(const JsonPart& part) : WholeWords(part, "[UNK]"), prefix_(part.text_or("continuing_subword_prefix", "##")) {
    if (part.has("max_input_chars_per_word")) longest_ = part.at("max_input_chars_per_word").integer(0, int64_t{1} << 30);
  }

  void encode(std::string_view piece, std::vector<int32_t>& ids) const override {
    const size_t before = ids.size();
    if (!cut(piece, ids)) {
      ids.resize(before);
      ids.push_back(unknown(piece));
    }
  }

 private:
  bool cut(std::string_view piece, std::vector<int32_t>& ids) const {
    int64_t characters = 0;
    for (const char c : piece) characters += (static_cast<unsigned char>(c) & 0xc0) != 0x80 ? 1 : 0;
    if (characters > longest_) return false;
    std::string continued;
    for (size_t begin = 0; begin < piece.size();) {
      if (begin > 0) continued.assign(prefix_).append(piece.substr(begin));
      std::string_view rest = begin > 0 ? std::string_view(continued) : piece;
      const size_t least = rest.size() - (piece.size() - begin);  // the prefix alone is no token of the piece
      int32_t id = -1;
      while (rest.size() > least && (id = vocabulary_.find(rest)) < 0) {
        size_t last = rest.size() - 1;
        while ((static_cast<unsigned char>(rest[last]) & 0xc0) == 0x80) --last;
        rest = rest.substr(0, last);
      }
      if (id < 0) return false;
      ids.push_back(id);
      begin += rest.size() - least;
    }
    return true;
  }

  std::string prefix_;
  int64_t longest_ = 100;
};

class WordLevel final : public WholeWords {
 public:
  explicit WordLevel(const JsonPart& part) : WholeWords(part, "<unk>") {}
  void encode(std::string_view piece, std::vector<int32_t>& ids) const override {
    const int32_t id = vocabulary_.find(piece);
    ids.push_back(id >= 0 ? id : unknown(piece));
  }
};

}  // namespace

std::unique_ptr<TokenModel> word_piece_model(const JsonPart& part) { return std::make_unique<WordPiece>(part); }
std::unique_ptr<TokenModel> word_level_model(const JsonPart& part) { return std::make_unique<WordLevel>(part); }

}  // namespace fw
