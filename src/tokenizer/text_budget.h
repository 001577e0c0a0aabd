// How much work one text may cost a tokenizer: steps of regular expressions, and bytes that normalizers and decoders
// add. A tokenizer.json of others cannot make a text take hours or all memory: what goes over the budget is an error.
// The budget covers a whole text, however many pieces it is cut into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fw {

class TextBudget {
 public:
  explicit TextBudget(size_t bytes);  // of the text

  // The largest number of steps that may be spent at once.
  uint64_t steps_left() const { return steps_; }
  // Spends steps of backtracking on a pattern, named in the error.
  void spend(uint64_t steps, std::string_view pattern);
  // A search that may have taken long without a step of backtracking: looks at the processor time of this thread every
  // now and then.
  void searched(std::string_view pattern, bool look_at_clock);
  // A part of the text that had `before` bytes has `after`.
  void grow(size_t before, size_t after);

 private:
  [[noreturn]] void fail_steps(std::string_view pattern) const;

  size_t bytes_;
  uint64_t steps_, growth_;
  uint64_t searches_ = 0;
  double deadline_ = 0;  // seconds of this thread's processor time; 0: the clock was not read
};

}  // namespace fw
