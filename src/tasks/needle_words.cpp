#include "tasks/needle_words.h"

#include <algorithm>

#include "base/error.h"
#include "tasks/json_fields.h"
#include "tasks/key_words.h"

namespace fw {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_hex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

constexpr size_t kUuid = 36;  // characters
bool is_uuid(std::string_view text) {
  if (text.size() < kUuid) return false;
  for (size_t i = 0; i < kUuid; ++i) {
    const bool hyphen = i == 8 || i == 13 || i == 18 || i == 23;
    if (hyphen ? text[i] != '-' : !is_hex(text[i])) return false;
  }
  return true;
}

const Tokenizer& no_tokenizer() {
  // texts are of the sizes that are asked for, not of what fits
  static const std::unique_ptr<Tokenizer> unused = byte_tokenizer();
  return *unused;
}

}  // namespace

std::vector<std::string_view> needle_pieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (size_t i = 0; i < text.size();) {
    if (is_uuid(text.substr(i))) {
      for (size_t j = 0; j < kUuid; ++j) pieces.push_back(text.substr(i + j, 1));
      i += kUuid;
      continue;
    }
    size_t end = i + 1;
    if (is_letter(text[i])) {
      while (end < text.size() && is_letter(text[end])) ++end;
    }
    if (text[i] != ' ' && text[i] != '\n') pieces.push_back(text.substr(i, end - i));
    i = end;
  }
  return pieces;
}

void NeedleWords::add(std::string_view piece) {
  if (ids_.emplace(piece, static_cast<int32_t>(pieces_.size())).second) pieces_.emplace_back(piece);
}

NeedleWords::NeedleWords(const std::string& task, int64_t size, Essay essay)
    : task_(task, 0, no_tokenizer(), std::move(essay)), size_(size) {
  // What is longer would take minutes to draw.
  constexpr int64_t kMostLines = int64_t{1} << 16, kMostWords = int64_t{1} << 20;
  const bool of_essay = needs_essay(task);
  if (const int64_t most = of_essay ? kMostWords : kMostLines; size < 1 || size > most) {
    fail_usage("length: expected 1 to {} {}, got {}", most, of_essay ? "words of the essay" : "lines of noise", size);
  }
  for (const char* digit : {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}) add(digit);
  for (const std::string_view word : key_adjectives()) add(word);
  for (const std::string_view word : key_nouns()) add(word);
  if (task_.has_uuids()) {
    for (const char* digit : {"a", "b", "c", "d", "e", "f", "-"}) add(digit);
  }
  Random random(0);
  const auto [prompt, value] = task_.text(random, 1);  // all else is the same in every text, but the essay
  for (const std::string_view piece : needle_pieces(prompt)) add(piece);
  for (const std::string& sentence : task_.essay().all()) {
    for (const std::string_view piece : needle_pieces(sentence)) add(piece);
  }
  length_ = static_cast<int64_t>(ids(random).size()) - 1;
}

std::vector<int32_t> NeedleWords::ids(Random& random) const {
  const auto [prompt, value] = task_.text(random, size_);
  const std::string text = prompt + " " + value;
  std::vector<int32_t> ids;
  for (const std::string_view piece : needle_pieces(text)) ids.push_back(ids_.at(std::string(piece)));
  return ids;
}

void NeedleWords::draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const {
  const size_t answer = task_.has_uuids() ? kUuid : 7;
  const std::vector<int32_t> all = ids(random);
  if (all.size() != tokens.size() + 1)
    fail_internal("needle: expected an example of {} tokens, got {}", tokens.size(), all.size() - 1);
  std::copy_n(all.begin(), tokens.size(), tokens.begin());
  for (size_t i = tokens.size() - answer; i < tokens.size(); ++i) {
    if (piece(all[i + 1]) != "-") labels[i] = all[i + 1];
  }
}

const std::string& NeedleWords::piece(int32_t token) const {
  if (token < 0 || token >= vocab_size())
    fail_internal("needle: expected a token below {}, got {}", vocab_size(), token);
  return pieces_[static_cast<size_t>(token)];
}

std::unique_ptr<SyntheticTask> needle_words(const std::string& task, const TaskOptions& options) {
  if (!needs_essay(task)) {
    if (!options.haystack.empty())
      fail_usage("haystack: expected none, since '{}' hides its needle in noise, got '{}'", task, options.haystack);
    return std::make_unique<NeedleWords>(task, options.length, Essay());
  }
  Essay essay;  // without a file NeedleTask says what is missing
  if (!options.haystack.empty()) essay = Essay(read_text(options.haystack), options.haystack);
  return std::make_unique<NeedleWords>(task, options.length, std::move(essay));
}

}  // namespace fw
