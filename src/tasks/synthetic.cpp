#include "tasks/synthetic.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "base/nearest.h"
#include "base/threads.h"
#include "tasks/needle_words.h"
#include "tasks/recall.h"
#include "tasks/sequences.h"

namespace fw {
namespace {

// SplitMix64's finaliser.
uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Known {
  const char* name;
  TaskOptions options;
  std::unique_ptr<SyntheticTask> (*make)(const TaskOptions& options);
  bool in_text = false;
};

const Known kKnown[] = {
    {"mqar", {.length = 256, .pairs = 32, .vocab_size = 8192}, kaczmarz_mqar},
    {"one_pair", {.length = 1024, .pairs = 1, .vocab_size = 8192}, kaczmarz_mqar},
    {"mqar_zoology", {.length = 256, .pairs = 64, .vocab_size = 8192, .passes = 1, .power = 0.01}, zoology_mqar},
    {"palindrome", {.length = 1024}, palindrome},
    {"stack", {.length = 1024}, stack},
    {"niah_single_1", {.length = 1}, [](const TaskOptions& options) { return needle_words("niah_single_1", options); }},
    {"niah_single_2",
     {.length = 100},
     [](const TaskOptions& options) { return needle_words("niah_single_2", options); },
     true},
    {"niah_single_3",
     {.length = 100},
     [](const TaskOptions& options) { return needle_words("niah_single_3", options); },
     true},
    {"niah_multikey_1",
     {.length = 100},
     [](const TaskOptions& options) { return needle_words("niah_multikey_1", options); },
     true},
};

const Known& find(std::string_view task) {
  for (const Known& known : kKnown) {
    if (task == known.name) return known;
  }
  const std::vector<std::string> names = synthetic_tasks();
  const std::string near = nearest(task, names);
  fail_usage("task: expected one of {}, got '{}'{}", fmt::join(names, ", "), task,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace

uint64_t example_seed(uint64_t seed, uint64_t index) { return scatter(scatter(seed) + index); }

TaskExample SyntheticTask::example(uint64_t seed, uint64_t index) const {
  TaskExample result{std::vector<int32_t>(static_cast<size_t>(length())),
                     std::vector<int32_t>(static_cast<size_t>(length()), kNoLabel)};
  Random random(example_seed(seed, index));
  draw(random, result.tokens, result.labels);
  return result;
}

void SyntheticTask::examples(uint64_t seed, uint64_t first, int64_t count, std::span<int32_t> tokens,
                             std::span<int32_t> labels) const {
  const auto size = static_cast<size_t>(length());
  parallel_for(count, [&](int64_t i) {
    const TaskExample one = example(seed, first + static_cast<uint64_t>(i));
    std::ranges::copy(one.tokens, tokens.subspan(static_cast<size_t>(i) * size, size).begin());
    std::ranges::copy(one.labels, labels.subspan(static_cast<size_t>(i) * size, size).begin());
  });
}

std::vector<std::string> synthetic_tasks() {
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.name);
  return names;
}

TaskOptions default_options(std::string_view task) { return find(task).options; }
bool hides_in_text(std::string_view task) { return find(task).in_text; }

std::unique_ptr<SyntheticTask> make_task(std::string_view task, const TaskOptions& options) {
  const Known& known = find(task);
  TaskOptions full = options;
  const auto complete = [](auto& value, auto otherwise) {
    if (value == 0) value = otherwise;
  };
  complete(full.length, known.options.length);
  complete(full.pairs, known.options.pairs);
  complete(full.vocab_size, known.options.vocab_size);
  complete(full.passes, known.options.passes);
  complete(full.power, known.options.power);
  constexpr int64_t kLongest = int64_t{1} << 24;
  if (full.length < 1 || full.length > kLongest) fail_usage("length: expected 1 to {}, got {}", kLongest, full.length);
  return known.make(full);
}

std::vector<TaskSegment> zoology_training() {
  return {{64, 4, 100000}, {128, 8, 20000}, {256, 16, 20000}, {256, 32, 20000}, {256, 64, 20000}};
}

std::vector<TaskSegment> zoology_tests() {
  return {{64, 4, 1000},   {64, 8, 1000},    {64, 16, 1000},   {128, 32, 1000},
          {256, 64, 1000}, {512, 128, 1000}, {1024, 256, 1000}};
}

double last_write_ceiling(const SyntheticTask& task, uint64_t seed, int64_t count) {
  if (!task.recalls_pairs()) fail_usage("the ceiling of a memory of pairs is asked of a task that is none");
  int64_t labels = 0, right = 0;
  std::unordered_map<int32_t, int32_t> follower;
  for (int64_t i = 0; i < count; ++i) {
    const TaskExample one = task.example(seed, static_cast<uint64_t>(i));
    follower.clear();
    for (size_t t = 0; t < one.tokens.size(); ++t) {
      if (t > 0) follower[one.tokens[t - 1]] = one.tokens[t];
      if (one.labels[t] == kNoLabel) continue;
      const auto found = follower.find(one.tokens[t]);
      ++labels;
      right += found != follower.end() && found->second == one.labels[t];
    }
  }
  return labels == 0 ? 0 : static_cast<double>(right) / static_cast<double>(labels);
}

TaskAccuracy task_accuracy(std::span<const int32_t> predictions, std::span<const int32_t> labels, int64_t length) {
  TaskAccuracy result;
  int64_t examples = 0;
  for (size_t begin = 0; begin + static_cast<size_t>(length) <= labels.size(); begin += static_cast<size_t>(length)) {
    int64_t asked = 0, correct = 0;
    for (size_t i = begin; i < begin + static_cast<size_t>(length); ++i) {
      if (labels[i] == kNoLabel) continue;
      ++asked;
      correct += predictions[i] == labels[i];
    }
    if (asked == 0) continue;
    ++examples;
    result.labels += asked;
    result.correct += correct;
    result.macro += static_cast<double>(correct) / static_cast<double>(asked);
  }
  if (examples > 0) {
    result.macro /= static_cast<double>(examples);
    result.micro = static_cast<double>(result.correct) / static_cast<double>(result.labels);
  }
  return result;
}

}  // namespace fw
