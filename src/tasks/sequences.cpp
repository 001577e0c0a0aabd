#include "tasks/sequences.h"

#include <array>

namespace fw {
namespace {

constexpr int32_t kVocabulary = 128;

int32_t below(Random& random, int n) { return static_cast<int32_t>(random.below(static_cast<uint64_t>(n))); }

class Palindrome : public SyntheticTask {
 public:
  explicit Palindrome(const TaskOptions& options)
      : source_(static_cast<size_t>(options.length)), first_(options.first) {}
  int32_t vocab_size() const override { return kVocabulary; }
  int64_t length() const override { return 2 * static_cast<int64_t>(source_) + 1; }
  bool recalls_pairs() const override { return false; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    constexpr int32_t kSeparator = 127;
    for (size_t i = 0; i < source_; ++i) tokens[i] = tokens[2 * source_ - i] = below(random, kSeparator);
    tokens[source_] = kSeparator;
    for (size_t i = source_ + (first_ ? 0 : 1); i < 2 * source_; ++i) labels[i] = tokens[i + 1];
  }

 private:
  size_t source_;
  bool first_;
};

class Stack : public SyntheticTask {
 public:
  explicit Stack(const TaskOptions& options) : length_(options.length) {}
  int32_t vocab_size() const override { return kVocabulary; }
  int64_t length() const override { return length_; }
  bool recalls_pairs() const override { return false; }
  void draw(Random& random, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    constexpr int kStacks = 64, kValues = 26, kFillers = 35;
    constexpr int32_t kFirstValue = 64, kPush = 90, kPop = 91, kQuery = 92, kFirstFiller = 93;
    std::array<std::vector<int32_t>, kStacks> stacks;
    std::vector<int> filled;  // stacks that hold something
    size_t at = 0;
    for (; at + 3 <= tokens.size(); at += 3) {
      if (filled.empty() || random.uniform() < 0.6) {
        const int which = below(random, kStacks);
        if (stacks[static_cast<size_t>(which)].empty()) filled.push_back(which);
        tokens[at] = kPush, tokens[at + 1] = which, tokens[at + 2] = kFirstValue + below(random, kValues);
        stacks[static_cast<size_t>(which)].push_back(tokens[at + 2]);
      } else {
        const auto index = static_cast<size_t>(below(random, static_cast<int>(filled.size())));
        const int which = filled[index];
        std::vector<int32_t>& values = stacks[static_cast<size_t>(which)];
        tokens[at] = kPop, tokens[at + 1] = which, tokens[at + 2] = kQuery;
        labels[at + 1] = values.back();
        values.pop_back();
        if (values.empty()) filled[index] = filled.back(), filled.pop_back();
      }
    }
    for (; at < tokens.size(); ++at) tokens[at] = kFirstFiller + below(random, kFillers);
  }

 private:
  int64_t length_;
};

}  // namespace

std::unique_ptr<SyntheticTask> palindrome(const TaskOptions& options) { return std::make_unique<Palindrome>(options); }
std::unique_ptr<SyntheticTask> stack(const TaskOptions& options) { return std::make_unique<Stack>(options); }

}  // namespace fw
