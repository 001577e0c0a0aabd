// A tokenizer.json of Hugging Face's tokenizers: added tokens are found first, the text between is normalised, cut into
// pieces and given to the model. What the file has besides (post_processor, truncation, padding) is about special
// tokens around a text and its length, which are the caller's here.
#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/decoder.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/token_model.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// The last place of a text where a space stands between two ASCII letters; 0: none.
size_t last_word_cut(std::string_view text) {
  if (text.size() < 3) return 0;
  for (size_t at = text.rfind(' ', text.size() - 2); at != std::string_view::npos && at > 0;
       at = text.rfind(' ', at - 1)) {
    if (is_letter(text[at - 1]) && is_letter(text[at + 1])) return at;
  }
  return 0;
}

// Pieces that have been seen, and their ids: words come again and again.
class PieceCache {
 public:
  template <class Make>
  void append(std::string_view piece, std::vector<int32_t>& ids, const Make& make) {
    if (piece.size() > kLongest) return make(piece, ids);
    if (const auto found = known_.find(piece); found != known_.end()) {
      ids.insert(ids.end(), found->second.begin(), found->second.end());
      return;
    }
    const auto before = static_cast<std::ptrdiff_t>(ids.size());
    make(piece, ids);
    if (known_.size() >= kMost) known_.clear();
    known_.emplace(piece, std::vector<int32_t>(ids.begin() + before, ids.end()));
  }

 private:
  static constexpr size_t kLongest = 64, kMost = size_t{1} << 17;
  std::unordered_map<std::string, std::vector<int32_t>, TextHash, std::equal_to<>> known_;
};

class HuggingFaceTokenizer final : public Tokenizer {
 public:
  HuggingFaceTokenizer(std::string text, const JsonPart& file, const std::string& end)
      : text_(std::move(text)), end_name_(end) {
    file.expect_object();
    model_ = token_model(file.at("model"));
    if (file.has("normalizer")) normalizer_ = Normalizer(file.at("normalizer"));
    if (file.has("pre_tokenizer")) pre_tokenizer_ = PreTokenizer(file.at("pre_tokenizer"));
    if (file.has("decoder")) decoder_ = TokenDecoder(file.at("decoder"));
    if (file.has("added_tokens")) read_added(file.at("added_tokens"));
    vocab_size_ = model_->vocabulary().end();
    for (const auto& [content, id] : added_ids_) vocab_size_ = std::max(vocab_size_, id + 1);
    name_tokens();
    if (!end_name_.empty()) end_ = id_of(end_name_);
    checksum_ = tokenizer_checksum(type(), text_);
  }

  int32_t vocab_size() const override { return vocab_size_; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    // One thread at a time uses what was learnt of pieces; another begins anew. The ids are the same.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    TextBudget budget(text.size());
    PieceCache own;
    PieceCache& cache = lock.owns_lock() ? cache_ : own;
    bool first = true;
    // Long texts go in parts where that makes no difference: what a part needs on the way is many times its size.
    while (cuts_before_words_ && text.size() > 2 * kPartBytes) {
      const size_t cut = last_word_cut(text.substr(0, kPartBytes));
      if (cut == 0) break;
      encode_bytes(text.substr(0, cut), first, cache, budget, ids);
      text.remove_prefix(cut);
      first = false;
    }
    encode_bytes(text, first, cache, budget, ids);
    return ids;
  }

  size_t whole_prefix(std::string_view text) const override { return cuts_before_words_ ? last_word_cut(text) : 0; }

  std::string decode(const std::vector<int32_t>& ids) const override {
    std::vector<std::string> tokens;
    tokens.reserve(ids.size());
    for (const int32_t id : ids) {
      check(id);
      if (named_[static_cast<size_t>(id)]) tokens.push_back(names_[static_cast<size_t>(id)]);
    }
    return decoder_.decode(std::move(tokens));
  }

  std::string piece(int32_t id) const override {
    check(id);
    return pieces_[static_cast<size_t>(id)];
  }

  std::string first_piece(int32_t id) const override {
    check(id);
    if (!named_[static_cast<size_t>(id)]) return "";
    TextBudget budget(names_[static_cast<size_t>(id)].size());
    return decoder_.piece(names_[static_cast<size_t>(id)], true, budget);
  }

  int32_t end_of_text() const override { return end_; }
  std::string type() const override { return "huggingface"; }
  uint64_t checksum() const override { return checksum_; }

  void save(const std::string& folder) const override {
    write_file_atomic(folder + "/tokenizer.json", text_);
    if (end_ >= 0)
      write_file_atomic(folder + "/tokenizer_config.json", nlohmann::json({{"eos_token", end_name_}}).dump() + "\n");
  }

 private:
  static constexpr size_t kPartBytes = size_t{1} << 20;

  void check(int32_t id) const {
    if (id < 0 || id >= vocab_size_)
      fail_usage("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size_);
  }

  int32_t id_of(const std::string& content) const {
    const auto found = added_ids_.find(content);
    return found != added_ids_.end() ? found->second : model_->vocabulary().find(content);
  }

  // Ids follow from the order of the list, as the package has it: the model's where it has the token, else the next
  // one.
  void read_added(const JsonPart& list) {
    std::vector<AddedToken> tokens;
    int32_t largest = -1;
    for (const JsonPart& part : list.elements()) {
      AddedToken token;
      token.content = part.at("content").text();
      token.single_word = part.flag_or("single_word", false);
      token.lstrip = part.flag_or("lstrip", false);
      token.rstrip = part.flag_or("rstrip", false);
      token.special = part.flag_or("special", false);
      token.normalized = part.flag_or("normalized", !token.special);
      const int64_t said = part.at("id").integer(0, 1 << 24);
      if (token.content.empty()) part.at("content").refuse("a text that is not empty");
      token.id = id_of(token.content);
      if (token.id < 0) token.id = largest >= model_->size() ? largest + 1 : model_->size();
      if (token.id != said) {
        part.at("id").refuse(fmt::format("{}, the id that the token '{}' has by its place", token.id, token.content));
      }
      largest = std::max(largest, token.id);
      added_ids_[token.content] = token.id;
      tokens.push_back(std::move(token));
    }
    cuts_before_words_ = true;
    size_t bytes = 0;
    for (const AddedToken& token : tokens) bytes += token.content.size();
    TextBudget budget(bytes);
    for (const bool special : {true, false}) {
      for (const AddedToken& token : tokens) {
        if (token.special != special) continue;
        size_t head = 0;
        const std::string pattern = token.normalized ? normalizer_.apply(token.content, head, budget) : token.content;
        // The package decodes a token that it looks for in another form to that form.
        added_names_[token.id] = pattern;
        (token.normalized ? normalized_ : raw_).add(token, pattern);
        cuts_before_words_ =
            cuts_before_words_ && !token.lstrip && !token.rstrip && pattern.find(' ') == std::string::npos;
      }
    }
    raw_.finish();
    normalized_.finish();
  }

  void name_tokens() {
    names_.resize(static_cast<size_t>(vocab_size_));
    pieces_.resize(static_cast<size_t>(vocab_size_));
    named_.resize(static_cast<size_t>(vocab_size_));
    const auto name = [&](int32_t id, const std::string& token) {
      names_[static_cast<size_t>(id)] = token;
      named_[static_cast<size_t>(id)] = true;
    };
    for (int32_t id = 0; id < model_->vocabulary().end(); ++id) {
      if (const std::string* token = model_->vocabulary().token(id)) name(id, *token);
    }
    for (const auto& [id, token] : added_names_) name(id, token);
    size_t bytes = 0;
    for (const std::string& token : names_) bytes += token.size();
    TextBudget budget(bytes);
    for (size_t id = 0; id < names_.size(); ++id) {
      if (named_[id]) pieces_[id] = decoder_.piece(names_[id], false, budget);
    }
    cuts_before_words_ =
        (cuts_before_words_ || added_ids_.empty()) && pre_tokenizer_.cuts_before_words() && normalizer_.is_form();
  }

  // Text that is not UTF-8: a byte-level tokenizer has tokens for the bytes, others read U+FFFD in their place.
  void encode_bytes(std::string_view text, bool first, PieceCache& cache, TextBudget& budget,
                    std::vector<int32_t>& ids) const {
    if (utf8_prefix(text) == text.size()) return encode_text(text, first, cache, budget, ids);
    std::string replaced;
    while (!text.empty()) {
      const size_t valid = utf8_prefix(text);
      if (pre_tokenizer_.bytes_last()) {
        encode_text(text.substr(0, valid), first, cache, budget, ids);
        if (valid < text.size()) model_->encode(to_byte_level(text.substr(valid, 1)), ids);
        first = false;
      } else {
        replaced += text.substr(0, valid);
        if (valid < text.size()) replaced += kReplacement;
      }
      text.remove_prefix(std::min(valid + 1, text.size()));
    }
    encode_text(replaced, first, cache, budget, ids);
  }

  void encode_text(std::string_view text, bool first, PieceCache& cache, TextBudget& budget,
                   std::vector<int32_t>& ids) const {
    std::vector<AddedTokens::Part> parts, inside;
    raw_.cut(text, parts);
    for (const auto& part : parts) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      size_t head = first && part.text.data() == text.data() ? utf8_length(part.text) : 0;
      std::string changed;
      std::string_view normal = part.text;
      if (!normalizer_.empty()) {
        changed = normalizer_.apply(std::string(part.text), head, budget);
        normal = changed;
      }
      normalized_.cut(normal, inside);
      for (const auto& rest : inside) {
        if (rest.id >= 0) {
          ids.push_back(rest.id);
        } else {
          const auto begin = static_cast<size_t>(rest.text.data() - normal.data());
          encode_part(rest.text, head - std::min(head, begin), cache, budget, ids);
        }
      }
    }
  }

  void encode_part(std::string_view text, size_t head, PieceCache& cache, TextBudget& budget,
                   std::vector<int32_t>& ids) const {
    const Pieces pieces = pre_tokenizer_.apply(text, head, budget);
    const bool bytes = pre_tokenizer_.bytes_last();
    for (const auto& piece : pieces.list) {
      cache.append(piece.text, ids, [&](std::string_view one, std::vector<int32_t>& out) {
        if (bytes) {
          model_->encode(to_byte_level(one), out);
        } else {
          model_->encode(one, out);
        }
      });
    }
  }

  std::string text_, end_name_;
  std::unique_ptr<TokenModel> model_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  TokenDecoder decoder_;
  AddedTokens raw_, normalized_;
  std::unordered_map<std::string, int32_t> added_ids_;
  std::unordered_map<int32_t, std::string> added_names_;
  std::vector<std::string> names_, pieces_;  // of ids: the token, and the bytes that it stands for
  std::vector<bool> named_;                  // of ids: whether there is a token
  int32_t vocab_size_ = 0, end_ = -1;
  uint64_t checksum_ = 0;
  bool cuts_before_words_ = false;
  mutable std::mutex mutex_;
  mutable PieceCache cache_;
};

}  // namespace

std::unique_ptr<Tokenizer> huggingface_tokenizer(std::string text, const nlohmann::json& json, const std::string& path,
                                                 const std::string& end) {
  return std::make_unique<HuggingFaceTokenizer>(std::move(text), JsonPart(json, path), end);
}

}  // namespace fw
