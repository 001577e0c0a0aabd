// Synthetic tasks of the papers: recall and memory tests whose examples are drawn, not read. An example is a row of
// tokens and, at the positions that count, the token that a model must put out there. Example i of a seed is a function
// of both alone, so that a stream can be entered anywhere, by any number of readers, and a resumed run sees what an
// undisturbed one does. Draws are ours (base/random.h): the distributions are the papers', the numbers are not those of
// their generators. docs/tasks.md has each task's origin and its traps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"

namespace fw {

inline constexpr int32_t kNoLabel = -100;  // nothing is asked at this position

// labels[p] is what the model must put out at input position p: they are not shifted.
struct TaskExample {
  std::vector<int32_t> tokens, labels;
};

// What a task is drawn with. Zero: the task's own default (default_options()).
struct TaskOptions {
  // tokens of an example; of palindrome: of the source, an example has 2 length + 1; of niah_single_1: lines of noise,
  // of the others:
  int64_t length = 0;
  // words of the essay
  int64_t pairs = 0;       // key-value pairs of the recall tasks
  int64_t vocab_size = 0;  // of the recall tasks
  int64_t passes = 0;      // how often mqar_zoology shows its pairs
  double power = 0;        // where mqar_zoology asks: place i after the pairs has a weight of i^(power - 1); 1: uniform
  bool noise = true;       // mqar_zoology fills what is left with random tokens instead of zeros
  bool first = true;       // palindrome asks for its first token too, at the separator
  std::string haystack{};  // file of the essay that niah_single_2, 3 and niah_multikey_1 hide their needles in
};

// What example `index` of a seed is drawn with: neighbouring seeds and indices have nothing to do with each other.
uint64_t example_seed(uint64_t seed, uint64_t index);

class SyntheticTask {
 public:
  virtual ~SyntheticTask() = default;
  virtual int32_t vocab_size() const = 0;
  virtual int64_t length() const = 0;      // tokens of an example
  virtual bool recalls_pairs() const = 0;  // a label is the value of the key at its position
  // tokens [length()], labels [length()], which holds kNoLabel everywhere.
  virtual void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const = 0;

  TaskExample example(uint64_t seed, uint64_t index) const;
  // tokens and labels [count, length()]: examples first ... first + count - 1 of a seed, on all threads.
  void examples(uint64_t seed, uint64_t first, int64_t count, std::span<int32_t> tokens,
                std::span<int32_t> labels) const;
};

// mqar           multi-query associative recall as Kaczmarz Linear Attention's experiments draw it: keys may repeat, noise may hit keys
// one_pair       the same with one pair (called S-NIAH there; it can be solved without keys)
// mqar_zoology   as Zoology and Based draw it: distinct keys, queries near the pairs
// palindrome     a random text, a separator, the text backwards
// stack          64 stacks, pushes and pops in any order; a pop asks for the value
// niah_single_1  RULER's needle in noise, a word or a digit a token (needle_words.h). The digits of the answer are
// asked for niah_single_2, niah_single_3, niah_multikey_1  the same in an essay: a number, a UUID, one of four numbers
std::vector<std::string> synthetic_tasks();
TaskOptions default_options(std::string_view task);
// Whether the task hides its needles in a text, which TaskOptions::haystack names.
bool hides_in_text(std::string_view task);
// Throws Error(kUsage) for an unknown task (with the nearest known one) and for options that it cannot be drawn with.
std::unique_ptr<SyntheticTask> make_task(std::string_view task, const TaskOptions& options);

// Zoology's training mixture and its test points: batches never mix them.
struct TaskSegment {
  int64_t length, pairs, examples;
};
std::vector<TaskSegment> zoology_training();
std::vector<TaskSegment> zoology_tests();

// The share of the labels that a perfect memory of pairs gets right, which keeps for every token the token that last
// followed it. It is what noise that repeats a key, and keys drawn twice, leave possible. Over `count` examples of a
// seed. Throws Error(kUsage) for a task that is not a recall of pairs (palindrome, stack: every label follows from the
// tokens before it).
double last_write_ceiling(const SyntheticTask& task, uint64_t seed, int64_t count);

// Of predictions [count, length] against labels [count, length]. micro: correct labels of all labels; macro: the mean
// over examples of each one's share (examples without labels are left out).
struct TaskAccuracy {
  int64_t labels = 0, correct = 0;
  double micro = 0, macro = 0;
};
TaskAccuracy task_accuracy(std::span<const int32_t> predictions, std::span<const int32_t> labels, int64_t length);

}  // namespace fw
