// WordPiece: a piece is cut from its left into the longest tokens that there are, those after the first with a prefix
// (##). One that cannot be cut so to its end, or is too long, is the unknown token. WordLevel: a piece is a token, or
// the unknown one.
#include "base/error.h"
#include "tokenizer/text_matcher.h"
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
        vocab.fail(fmt::format("the token '{}': expected an id from 0 to {}, got {}", token, kMostIds,
                               id.dump(-1, ' ', true).substr(0, 40)));
      }
      const int32_t value = id.get<int32_t>();
      if (const std::string* other = vocabulary_.token(value))
        vocab.fail(fmt::format("the tokens '{}' and '{}' have the same id, {}", *other, token, value));
      vocabulary_.add(token, value);
    }
    if (vocabulary_.count() == 0) vocab.refuse("tokens and their ids");
    unknown_name_ = part.text_or("unk_token", unknown);
    unknown_ = vocabulary_.find(unknown_name_);
  }

  int32_t unknown(std::string_view piece) const {
    if (unknown_ < 0) {
      fail_usage("the tokenizer has no token for '{}', and its unk_token '{}' is not in its vocabulary",
                 utf8_start(piece, 40), unknown_name_);
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
  explicit WordPiece(const JsonPart& part) : WholeWords(part, "[UNK]") {
    if (part.has("max_input_chars_per_word"))
      longest_ = part.at("max_input_chars_per_word").integer(0, int64_t{1} << 30);
    const std::string prefix = part.text_or("continuing_subword_prefix", "##");
    std::vector<std::pair<std::string_view, int32_t>> starts, rest;
    for (int32_t id = 0; id < vocabulary_.end(); ++id) {
      const std::string* token = vocabulary_.token(id);
      if (token == nullptr) continue;
      starts.emplace_back(*token, id);
      if (token->starts_with(prefix)) rest.emplace_back(std::string_view(*token).substr(prefix.size()), id);
    }
    starts_ = TextMatcher(starts);
    rest_ = TextMatcher(rest);
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
    std::vector<TextMatcher::Found> found;
    starts_.find(piece, found);
    if (found.empty() || found.back().begin != 0) return false;
    ids.push_back(found.back().value);
    size_t done = found.back().length;
    if (done == piece.size()) return true;
    rest_.find(piece, found);
    for (; !found.empty(); found.pop_back()) {
      if (found.back().begin < done) continue;
      if (found.back().begin > done) return false;
      ids.push_back(found.back().value);
      done += found.back().length;
    }
    return done == piece.size();
  }

  int64_t longest_ = 100;
  TextMatcher starts_, rest_;  // tokens that begin a word, and those that go on, without the prefix
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
