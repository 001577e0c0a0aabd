#include "tasks/needle_words.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "tasks/key_words.h"
#include "tasks/needle.h"

namespace fw {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Every piece that a text of the task can have, each once.
struct Vocabulary {
  std::vector<std::string> pieces;
  std::unordered_map<std::string_view, int32_t> ids;

  explicit Vocabulary(const NeedleTask& task) {
    for (const char* digit : {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}) add(digit);
    for (const std::string_view word : key_adjectives()) add(word);
    for (const std::string_view word : key_nouns()) add(word);
    Random random(0);
    const auto [prompt, value] = task.text(random, 1);  // all else is the same in every text
    for (const std::string_view piece : needle_pieces(prompt)) add(piece);
    for (size_t i = 0; i < pieces.size(); ++i) ids.emplace(pieces[i], static_cast<int32_t>(i));
  }

 private:
  void add(std::string_view piece) {
    if (std::ranges::find(pieces, piece) == pieces.end()) pieces.emplace_back(piece);
  }
};

const NeedleTask& noise_task() {
  static const std::unique_ptr<Tokenizer> unused = byte_tokenizer();  // texts are of the sizes that are asked for, not of what fits
  static const NeedleTask task("niah_single_1", 0, *unused, {});
  return task;
}

const Vocabulary& vocabulary() {
  static const Vocabulary all(noise_task());
  return all;
}

class NeedleWords : public SyntheticTask {
 public:
  explicit NeedleWords(int64_t lines) : lines_(lines) {
    Random random(0);
    length_ = static_cast<int64_t>(ids(random).size()) - 1;
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(vocabulary().pieces.size()); }
  int64_t length() const override { return length_; }
  bool recalls_pairs() const override { return false; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    constexpr size_t kDigits = 7;
    const std::vector<int32_t> all = ids(random);
    std::copy_n(all.begin(), tokens.size(), tokens.begin());
    for (size_t i = tokens.size() - kDigits; i < tokens.size(); ++i) labels[i] = all[i + 1];
  }

 private:
  // Of prompt and answer.
  std::vector<int32_t> ids(Random& random) const {
    const auto [prompt, value] = noise_task().text(random, lines_);
    const std::string text = prompt + " " + value;
    std::vector<int32_t> ids;
    for (const std::string_view piece : needle_pieces(text)) ids.push_back(vocabulary().ids.at(piece));
    return ids;
  }

  int64_t lines_, length_ = 0;
};

}  // namespace

std::vector<std::string_view> needle_pieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (is_letter(text[i])) {
      while (end < text.size() && is_letter(text[end])) ++end;
    }
    if (text[i] != ' ' && text[i] != '\n') pieces.push_back(text.substr(i, end - i));
    i = end;
  }
  return pieces;
}

const std::string& needle_piece(int32_t token) {
  const std::vector<std::string>& pieces = vocabulary().pieces;
  if (token < 0 || token >= static_cast<int32_t>(pieces.size())) fail_internal("needle: expected a token below {}, got {}", pieces.size(), token);
  return pieces[static_cast<size_t>(token)];
}

std::unique_ptr<SyntheticTask> needle_words(const TaskOptions& options) {
  // A line is 24 tokens; what is longer would take minutes to draw.
  constexpr int64_t kMostLines = 1 << 16;
  if (options.length > kMostLines) fail_usage("length: expected 1 to {} lines of noise, got {}", kMostLines, options.length);
  return std::make_unique<NeedleWords>(options.length);
}

}  // namespace fw
