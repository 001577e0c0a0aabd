// Learning rate: linear warm-up, then half a cosine down to min_lr at the last step.
#pragma once

#include <cstdint>

namespace fw {

struct Schedule {
  double lr = 0, min_lr = 0;
  int64_t warmup = 0;  // steps until lr is reached; 0: lr from the start
  int64_t steps = 0;   // of the whole run
};

// Of step `step` (0 is the first): lr * (step + 1) / warmup for step < warmup, min_lr for step >= steps - 1. It depends on
// the step alone, so that a resumed or a skipped step cannot shift it.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace fw
