#include "tokenizer/text_budget.h"

#include <ctime>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

// Published patterns need fewer than 8 steps a byte beyond those that are not counted.
constexpr uint64_t kSteps = uint64_t{1} << 24, kStepsPerByte = 64;
constexpr uint64_t kGrowth = uint64_t{1} << 22, kGrowthPerByte = 64;
// Possessive repeats and lookaround work without steps. Published patterns take less than 1 us a byte.
constexpr double kSeconds = 10, kSecondsPerByte = 10e-6;
constexpr uint64_t kSearchesBetweenLooks = 256;

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

TextBudget::TextBudget(size_t bytes)
    : bytes_(bytes), steps_(kSteps + kStepsPerByte * bytes), growth_(kGrowth + kGrowthPerByte * bytes) {}

void TextBudget::fail_steps(std::string_view pattern) const {
  fail_usage("the tokenizer's regular expression '{}' takes too long on a text of {} bytes: it tries too many ways",
             utf8_start(pattern, 60), bytes_);
}

void TextBudget::spend(uint64_t steps, std::string_view pattern) {
  if (steps >= steps_) fail_steps(pattern);
  steps_ -= steps;
}

void TextBudget::searched(std::string_view pattern, bool look_at_clock) {
  if (!look_at_clock && ++searches_ % kSearchesBetweenLooks != 0) return;
  const double now = processor_seconds();
  if (deadline_ == 0) deadline_ = now + kSeconds + kSecondsPerByte * static_cast<double>(bytes_);
  if (now > deadline_) fail_steps(pattern);
}

void TextBudget::grow(size_t before, size_t after) {
  if (after <= before) return;
  if (after - before > growth_) {
    fail_usage(
        "the tokenizer makes too much of a text of {} bytes: expected at most {} times its size and {} MiB more; one "
        "of its steps \"Replace\" or \"Prepend\" "
        "multiplies the text",
        bytes_, kGrowthPerByte, kGrowth >> 20);
  }
  growth_ -= after - before;
}

}  // namespace fw
