#include "tasks/needle.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "base/nearest.h"
#include "base/random.h"
#include "tasks/key_words.h"
#include "tasks/synthetic.h"
#include "tasks/unicode.h"

namespace fw {
namespace {

constexpr const char* kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

struct Kind {
  const char* name;
  bool essay, uuid;
  size_t keys;
};
constexpr Kind kKinds[] = {{"niah_single_1", false, false, 1},
                           {"niah_single_2", true, false, 1},
                           {"niah_single_3", true, true, 1},
                           {"niah_multikey_1", true, false, 4}};

const Kind& kind_of(const std::string& task) {
  for (const Kind& kind : kKinds) {
    if (task == kind.name) return kind;
  }
  const std::string near = nearest(task, needle_tasks());
  fail_usage("task: expected one of {}, got '{}'{}", fmt::join(needle_tasks(), ", "), task,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

std::string draw_key(Random& random) {
  const auto adjective = key_adjectives()[random.below(key_adjectives().size())];
  return fmt::format("{}-{}", adjective, key_nouns()[random.below(key_nouns().size())]);
}

std::string draw_value(Random& random, bool uuid) {
  if (!uuid) return fmt::format("{}", 1000000 + random.below(9000000));
  // RFC 9562
  const uint64_t high = (random.bits() & ~uint64_t{0xf000}) | 0x4000,
                 low = (random.bits() & ~(uint64_t{3} << 62)) | (uint64_t{2} << 62);
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xffff, high & 0xffff, low >> 48,
                     low & 0xffffffffffff);
}

// Distinct depths of round(linspace(0, 100, 40)), growing.
std::vector<int64_t> draw_depths(Random& random, size_t count) {
  std::array<int64_t, 40> depths{};
  for (size_t i = 0; i < depths.size(); ++i)
    depths[i] = std::lround(100.0 * static_cast<double>(i) / static_cast<double>(depths.size() - 1));
  for (size_t i = 0; i < count; ++i) std::swap(depths[i], depths[i + random.below(depths.size() - i)]);
  std::vector<int64_t> chosen(depths.begin(), depths.begin() + static_cast<int64_t>(count));
  std::ranges::sort(chosen);
  return chosen;
}

}  // namespace

std::vector<std::string> needle_tasks() {
  std::vector<std::string> names;
  names.reserve(std::size(kKinds));
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

bool needs_essay(const std::string& task) { return kind_of(task).essay; }

Essay::Essay(std::string_view text, const std::string& name) {
  const std::vector<std::string_view> words = words_of(text);
  if (words.empty()) fail_usage("'{}': expected a text to hide needles in, it has no word", name);
  sentences_ = sentences_of(fmt::format("{}", fmt::join(words, " ")));
  words_.reserve(sentences_.size());
  for (const std::string& sentence : sentences_) words_.push_back(static_cast<int64_t>(words_of(sentence).size()));
}

std::vector<std::string> Essay::sentences(int64_t words) const {
  std::vector<std::string> result;
  for (size_t i = 0; words > 0; i = (i + 1) % sentences_.size()) {
    if (words_[i] <= words) {
      result.push_back(sentences_[i]);
    } else {
      std::vector<std::string_view> part = words_of(sentences_[i]);
      part.resize(static_cast<size_t>(words));
      result.push_back(fmt::format("{}", fmt::join(part, " ")));
    }
    words -= words_[i];
  }
  return result;
}

struct NeedleTask::Draw {
  std::string key, value;            // asked for
  std::vector<std::string> needles;  // in the order of their places
  std::vector<int64_t> depths;       // growing, in per cent
  double position = 0;               // of the line in noise, [0, 1)
};

NeedleTask::Draw NeedleTask::draw(Random& random) const {
  const Kind& kind = kind_of(task_);
  Draw d;
  std::vector<std::string> keys;
  while (keys.size() < kind.keys) {
    const std::string key = draw_key(random);
    if (std::ranges::find(keys, key) != keys.end()) continue;
    const std::string value = draw_value(random, kind.uuid);
    if (keys.empty()) d.key = key, d.value = value;
    keys.push_back(key);
    d.needles.push_back(
        fmt::format("One of the special magic {} for {} is: {}.", kind.uuid ? "uuids" : "numbers", key, value));
  }
  for (size_t i = d.needles.size(); i > 1; --i) std::swap(d.needles[i - 1], d.needles[random.below(i)]);
  d.depths = draw_depths(random, kind.keys);
  d.position = random.uniform();
  return d;
}

std::string NeedleTask::context(const Draw& draw, int64_t size) const {
  if (!kind_of(task_).essay) {
    std::vector<std::string_view> lines(static_cast<size_t>(size), kNoise);
    lines.insert(lines.begin() + static_cast<int64_t>(draw.position * static_cast<double>(size)), draw.needles.front());
    return fmt::format("{}", fmt::join(lines, "\n"));
  }
  const std::vector<std::string> sentences = essay_.sentences(size);
  std::vector<std::string_view> parts;
  parts.reserve(sentences.size() + draw.needles.size());
  size_t next = 0;
  for (size_t i = 0; i <= sentences.size(); ++i) {
    for (; next < draw.needles.size() &&
           static_cast<int64_t>(sentences.size()) * draw.depths[next] / 100 == static_cast<int64_t>(i);
         ++next) {
      parts.emplace_back(draw.needles[next]);
    }
    if (i < sentences.size()) parts.emplace_back(sentences[i]);
  }
  return fmt::format("{}", fmt::join(parts, " "));
}

std::string NeedleTask::prompt(const Draw& draw, int64_t size) const {
  const char* what = kind_of(task_).uuid ? "uuid" : "number";
  return fmt::format(
      "A special magic {0} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
      "{0} afterwards.\n{1}\nWhat is the special "
      "magic {0} for {2} mentioned in the provided text? The special magic {0} for {2} mentioned in the provided text "
      "is",
      what, context(draw, size), draw.key);
}

int64_t NeedleTask::tokens(const Draw& draw, int64_t size) const {
  return static_cast<int64_t>(tokenizer_.encode(prompt(draw, size)).size()) + kNeedleOutput;
}

NeedleTask::NeedleTask(const std::string& task, int64_t max_length, const Tokenizer& tokenizer, Essay essay)
    : task_(task), max_length_(max_length), tokenizer_(tokenizer), essay_(std::move(essay)) {
  if (kind_of(task).essay && essay_.empty())
    fail_usage("'{}' hides its needles in a text: give one with --haystack", task);
}

bool NeedleTask::has_uuids() const { return kind_of(task_).uuid; }

std::pair<std::string, std::string> NeedleTask::text(Random& random, int64_t size) const {
  const Draw d = draw(random);
  return {prompt(d, size), d.value};
}

Request NeedleTask::example(uint64_t seed, uint64_t index) const {
  Random random(example_seed(seed, index));
  const Draw d = draw(random);
  if (const int64_t least = tokens(d, 1); least > max_length_) {
    fail_usage(
        "{}: example {} takes at least {} tokens ({} of them of the output) with this tokenizer, more than the length "
        "of {}",
        task_, index, least, kNeedleOutput, max_length_);
  }
  int64_t fits = 1, too_large = 2;
  while (tokens(d, too_large) <= max_length_) fits = too_large, too_large *= 2;
  while (too_large - fits > 1) {
    const int64_t middle = fits + (too_large - fits) / 2;
    (tokens(d, middle) <= max_length_ ? fits : too_large) = middle;
  }
  Request request;
  request.task = task_;
  request.id = fmt::format("{}", index);
  request.kind = RequestKind::kGenerate;
  request.contexts = {prompt(d, fits)};
  request.answers = {d.value};
  request.max_gen = kNeedleOutput;
  request.max_length = max_length_;
  request.metric = AnswerMetric::kSubstrAll;
  return request;
}

}  // namespace fw
