// The needle tasks (needle.h) as tasks of their own: RULER's texts to the letter, with a word, a digit or a mark a
// token. So a small model can be trained on them and judged by its answers. Only the answer is asked for: with a loss
// on the whole text models of this size do not find the needle in the time that a test has (docs/tasks.md).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "tasks/needle.h"
#include "tasks/synthetic.h"

namespace fw {

// The words, digits and marks of a text, white space left out. Of a UUID (8-4-4-4-12 hexadecimal digits) every
// character is a piece.
std::vector<std::string_view> needle_pieces(std::string_view text);

// An example is the prompt and all of the answer but its last piece. The labels are the answer's digits, hyphens left
// out: 7, or the 32 of a UUID.
class NeedleWords : public SyntheticTask {
 public:
  // `size`: lines of noise (an example of niah_single_1 has 82 + 24 size tokens) or words of the essay, whose words are
  // all in the vocabulary. Throws Error(kUsage): as NeedleTask, and a size beyond 65,536 lines or 2^20 words.
  NeedleWords(const std::string& task, int64_t size, Essay essay);

  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }
  int64_t length() const override { return length_; }
  bool recalls_pairs() const override { return false; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override;

  // What a token is; Error(kInternal) outside the vocabulary.
  const std::string& piece(int32_t token) const;

 private:
  void add(std::string_view piece);
  // Of prompt and answer.
  std::vector<int32_t> ids(Random& random) const;

  NeedleTask task_;
  int64_t size_, length_ = 0;
  std::vector<std::string> pieces_;
  std::unordered_map<std::string, int32_t> ids_;
};

// Task and essay by the options: `length` is the size, `haystack` the file of the essay (niah_single_1 has none, and
// refuses one).
std::unique_ptr<SyntheticTask> needle_words(const std::string& task, const TaskOptions& options);

}  // namespace fw
