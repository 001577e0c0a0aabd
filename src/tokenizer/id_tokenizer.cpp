// Token ids as text: numbers between spaces. For models that come without a tokenizer that this program reads.
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

class IdTokenizer final : public Tokenizer {
 public:
  IdTokenizer(int32_t vocab_size, std::string advice) : vocab_size_(vocab_size), advice_(std::move(advice)) {}
  int32_t vocab_size() const override { return vocab_size_; }
  std::vector<int32_t> encode(std::string_view text) const override {
    constexpr std::string_view kSpace = " \t\r\n";
    std::vector<int32_t> ids;
    for (size_t begin = text.find_first_not_of(kSpace); begin != std::string_view::npos;
         begin = text.find_first_not_of(kSpace, begin)) {
      const std::string_view word = text.substr(begin, text.find_first_of(kSpace, begin) - begin);
      int32_t id = -1;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
      if (error != std::errc() || end != word.data() + word.size() || id < 0 || id >= vocab_size_) {
        fail_usage("text of token ids: expected numbers from 0 to {} between spaces, got '{}'{}", vocab_size_ - 1,
                   utf8_start(word, 40), advice_);
      }
      ids.push_back(id);
      begin += word.size();
    }
    return ids;
  }
  size_t whole_prefix(std::string_view text) const override {
    const size_t space = text.find_last_of(" \t\r\n");
    return space == std::string_view::npos ? 0 : space + 1;
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string piece(int32_t id) const override {
    if (id < 0 || id >= vocab_size_)
      fail_usage("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size_);
    return fmt::format("{} ", id);
  }
  std::string type() const override { return "ids"; }
  uint64_t checksum() const override { return tokenizer_checksum(type(), fmt::format("{}", vocab_size_)); }
  void save(const std::string& folder) const override {
    write_file_atomic(folder + "/tokenizer.json",
                      nlohmann::json({{"type", "ids"}, {"vocab_size", vocab_size_}}).dump() + "\n");
  }

 private:
  int32_t vocab_size_;
  std::string advice_;
};

}  // namespace

std::unique_ptr<Tokenizer> id_tokenizer(int32_t vocab_size, std::string advice) {
  if (vocab_size < 1) fail_usage("token ids: expected a vocabulary of at least 1, got {}", vocab_size);
  return std::make_unique<IdTokenizer>(vocab_size, std::move(advice));
}

}  // namespace fw
