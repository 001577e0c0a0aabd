#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include "base/error.h"

namespace fw {
namespace {

constexpr std::pair<const char*, ScheduleShape> kShapes[] = {{"cosine", ScheduleShape::kCosine},
                                                             {"linear", ScheduleShape::kLinear},
                                                             {"constant", ScheduleShape::kConstant},
                                                             {"wsd", ScheduleShape::kWsd}};

// Down from lr at `begin` steps done to min_lr at the last.
double line(const Schedule& s, int64_t begin, int64_t done) {
  return s.min_lr + (s.lr - s.min_lr) * static_cast<double>(s.steps - done) / static_cast<double>(s.steps - begin);
}

}  // namespace

const std::vector<std::string>& schedule_shapes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& [known, shape] : kShapes) all.emplace_back(known);
    return all;
  }();
  return names;
}

ScheduleShape parse_schedule_shape(const std::string& name) {
  for (const auto& [known, shape] : kShapes) {
    if (name == known) return shape;
  }
  fail_internal("no schedule '{}'", name);
}

double learning_rate(const Schedule& schedule, int64_t step) {
  const int64_t done = step + 1, warmup = schedule.warmup, steps = schedule.steps;
  if (done <= warmup) {
    // In this form a warm-up from 0 has the bits of lr n / W.
    return schedule.warmup_from +
           (schedule.lr - schedule.warmup_from) * static_cast<double>(done) / static_cast<double>(warmup);
  }
  if (schedule.shape == ScheduleShape::kConstant) return schedule.lr;
  if (done >= steps) return schedule.min_lr;
  if (schedule.shape == ScheduleShape::kLinear) return line(schedule, warmup, done);
  if (schedule.shape == ScheduleShape::kWsd) {
    const int64_t decay = std::llround(schedule.decay_share * static_cast<double>(steps));
    const int64_t begin = std::max(steps - decay, warmup);
    return done <= begin ? schedule.lr : line(schedule, begin, done);
  }
  const double share = static_cast<double>(done - warmup) / static_cast<double>(steps - warmup);
  return schedule.min_lr + 0.5 * (schedule.lr - schedule.min_lr) * (1.0 + std::cos(std::numbers::pi * share));
}

}  // namespace fw
