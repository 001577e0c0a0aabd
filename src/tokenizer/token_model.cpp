#include "tokenizer/token_model.h"

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {

void Vocabulary::add(std::string token, int32_t id) {
  const auto [entry, added] = ids_.try_emplace(std::move(token), id);
  if (!added) {
    tokens_[static_cast<size_t>(entry->second)] = nullptr;
    entry->second = id;
  }
  if (id >= end()) tokens_.resize(static_cast<size_t>(id) + 1);
  tokens_[static_cast<size_t>(id)] = &entry->first;
}

int32_t Vocabulary::find(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

const std::string* Vocabulary::token(int32_t id) const {
  return id < 0 || id >= end() ? nullptr : tokens_[static_cast<size_t>(id)];
}

bool TokenModel::byte_pieces(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  for (const char c : text) {
    const int32_t id =
        vocabulary_.find(fmt::format("<0x{:02X}>", static_cast<unsigned>(static_cast<unsigned char>(c))));
    if (id < 0) {
      ids.resize(before);
      return false;
    }
    ids.push_back(id);
  }
  return true;
}

std::unique_ptr<TokenModel> token_model(const JsonPart& part) {
  // Files of before 2022 may leave the type out: a list of merges is BPE's, a longest word WordPiece's.
  const std::string name = part.text_or("type", part.has("merges")                     ? "BPE"
                                                : part.has("max_input_chars_per_word") ? "WordPiece"
                                                                                       : "");
  if (name == "BPE") return bpe_model(part);
  if (name == "Unigram") return unigram_model(part);
  if (name == "WordPiece") return word_piece_model(part);
  if (name == "WordLevel") return word_level_model(part);
  const JsonPart type = part.at("type");
  type.fail(
      fmt::format("the model '{}' is not supported; BPE, Unigram, WordPiece and WordLevel are", utf8_start(name, 40)));
}

}  // namespace fw
