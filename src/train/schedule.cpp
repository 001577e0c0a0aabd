#include "train/schedule.h"

#include <cmath>
#include <numbers>

namespace fw {

double learning_rate(const Schedule& schedule, int64_t step) {
  if (step < schedule.warmup) return schedule.lr * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup);
  if (step + 1 >= schedule.steps) return schedule.min_lr;
  const double done = static_cast<double>(step + 1 - schedule.warmup) / static_cast<double>(schedule.steps - schedule.warmup);
  return schedule.min_lr + 0.5 * (schedule.lr - schedule.min_lr) * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace fw
