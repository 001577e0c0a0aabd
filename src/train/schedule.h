// The learning rate of a step. With n = step + 1 the steps that are done after it, W = warmup, N = steps, and D the
// whole number of steps nearest to decay_share * N (at most N - W):
//
//   n <= W           warmup_from + (lr - warmup_from) n / W                             linear warm-up, of every shape
//   constant         lr
//   cosine           min_lr + (lr - min_lr) (1 + cos(pi (n - W) / (N - W))) / 2
//   linear           min_lr + (lr - min_lr) (N - n) / (N - W)
//   wsd              lr while n <= N - D, then min_lr + (lr - min_lr) (N - n) / D       warm-up, stable, decay
//
// All but constant have min_lr at the last step, n = N, and after it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fw {

enum class ScheduleShape { kCosine, kLinear, kConstant, kWsd };

struct Schedule {
  double lr = 0, min_lr = 0;
  int64_t warmup = 0;  // steps until lr is reached; 0: lr from the start
  int64_t steps = 0;   // of the whole run
  ScheduleShape shape = ScheduleShape::kCosine;
  double decay_share = 0.2;  // wsd
  double warmup_from = 0;    // the rate that the warm-up begins above: 0, or the papers' lr / 10
};

// cosine, linear, constant, wsd.
const std::vector<std::string>& schedule_shapes();
// Of one of these names.
ScheduleShape parse_schedule_shape(const std::string& name);

// Of step `step` (0 is the first). It depends on the step alone, so that a resumed or a skipped step cannot shift it.
double learning_rate(const Schedule& schedule, int64_t step);

}  // namespace fw
