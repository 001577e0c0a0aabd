// Needle tasks as RULER has them (Hsieh et al. 2024): a sentence with a value hidden in a long text, and the question
// for it.
//
//   niah_single_1    one key; the text is noise (five short sentences, a line, again and again); the value a number of 7 digits
//   niah_single_2    one key; the text is an essay, the needle between two of its sentences
//   niah_single_3    the same with a UUID (version 4) as its value
//   niah_multikey_1  four keys with a number each in an essay, one asked for
//
// Keys are words (adjective-noun, key_words.h). In noise the needle is a line of its own at a uniform place; in an
// essay needles stand before sentence floor(count * depth / 100), depths drawn without replacement from 40 of 0 to 100.
// Example i of a seed is a function of both, of the essay and of the tokenizer by which it is sized. It has the largest
// text (lines of noise, words of essay) with which prompt and output fit.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "tasks/request.h"
#include "tokenizer/tokenizer.h"

namespace fw {

std::vector<std::string> needle_tasks();
bool needs_essay(const std::string& task);

inline constexpr int64_t kNeedleOutput = 128;  // tokens that a model may put out

// A text to hide in: white space collapsed, split into sentences, begun again where it ends.
class Essay {
 public:
  Essay() = default;
  // Throws Error(kUsage) naming `name` when the text has no word.
  Essay(std::string_view text, const std::string& name);
  // Sentences of the first `words` words, the last of them cut.
  std::vector<std::string> sentences(int64_t words) const;
  bool empty() const { return sentences_.empty(); }
  const std::vector<std::string>& all() const { return sentences_; }  // sentences, each once

 private:
  std::vector<std::string> sentences_;
  std::vector<int64_t> words_;  // of each
};

class NeedleTask {
 public:
  // The tokenizer must outlive it. Throws Error(kUsage): unknown task (with the nearest known one), a task that needs
  // an essay without one, a max_length that not even the smallest text fits into.
  NeedleTask(const std::string& task, int64_t max_length, const Tokenizer& tokenizer, Essay essay);
  // max_gen tokens and all of the prompt are at most max_length.
  Request example(uint64_t seed, uint64_t index) const;
  // Prompt and answer with a text of just this size, in lines of noise or words of essay (>= 1), whatever max_length
  // is.
  std::pair<std::string, std::string> text(Random& random, int64_t size) const;
  bool has_uuids() const;  // as values, in place of numbers
  const Essay& essay() const { return essay_; }

 private:
  struct Draw;
  std::string prompt(const Draw& draw, int64_t size) const;
  std::string context(const Draw& draw, int64_t size) const;
  int64_t tokens(const Draw& draw, int64_t size) const;
  Draw draw(Random& random) const;

  std::string task_;
  int64_t max_length_;
  const Tokenizer& tokenizer_;
  Essay essay_;
};

}  // namespace fw
