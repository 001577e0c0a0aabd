// Rows of a pass by their numbers: those whose logits are wanted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fw {

class ChosenRows {
 public:
  explicit ChosenRows(std::span<const int64_t> rows) : numbers_(rows.begin(), rows.end()) {}

  // The rows with a target, where they are at most half of all: the head, whose width is the vocabulary, then computes
  // them alone. A task of recall asks at one position in eight, a choice is scored after a long context.
  static std::optional<ChosenRows> few_scored(std::span<const int32_t> targets);

  int64_t count() const { return static_cast<int64_t>(numbers_.size()); }
  int64_t number(int64_t i) const { return numbers_[static_cast<size_t>(i)]; }
  const std::vector<int32_t>& numbers() const { return numbers_; }
  std::vector<int32_t> of(std::span<const int32_t> values) const;

 private:
  std::vector<int32_t> numbers_;
};

}  // namespace fw
