#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "base/error.h"

namespace fw {
namespace {

TEST(Schedule, WarmsUpLinearlyAndReachesLrAtTheLastWarmupStep) {
  const Schedule schedule{2e-3, 2e-4, 10, 100};
  for (int64_t step = 0; step < 10; ++step)
    EXPECT_DOUBLE_EQ(learning_rate(schedule, step), 2e-3 * static_cast<double>(step + 1) / 10);
}

// Preconditioned DeltaNet (E.1): from 4e-5 to 4e-4. The first step is one part of the way up, as without it.
TEST(Schedule, WarmsUpFromAGivenRate) {
  Schedule schedule{4e-4, 4e-5, 954, 28610};
  schedule.warmup_from = 4e-5;
  EXPECT_NEAR(learning_rate(schedule, 0), 4e-5 + 3.6e-4 / 954, 1e-18);
  EXPECT_NEAR(learning_rate(schedule, 476), 2.2e-4, 1e-18);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 953), 4e-4);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 28609), 4e-5);
  for (const ScheduleShape shape : {ScheduleShape::kLinear, ScheduleShape::kConstant, ScheduleShape::kWsd}) {
    schedule.shape = shape;
    EXPECT_NEAR(learning_rate(schedule, 476), 2.2e-4, 1e-18);
  }
}

TEST(Schedule, FallsAsHalfACosineToMinLrAtTheLastStep) {
  const Schedule schedule{2e-3, 2e-4, 10, 110};
  // A quarter, half and three quarters of the way from the last warm-up step (9) to the last step (109).
  EXPECT_NEAR(learning_rate(schedule, 34), 2e-4 + 1.8e-3 * 0.5 * (1 + std::numbers::sqrt2 / 2), 1e-15);
  EXPECT_NEAR(learning_rate(schedule, 59), 1.1e-3, 1e-15);
  EXPECT_NEAR(learning_rate(schedule, 84), 2e-4 + 1.8e-3 * 0.5 * (1 - std::numbers::sqrt2 / 2), 1e-15);
  EXPECT_EQ(learning_rate(schedule, 109), 2e-4);
  EXPECT_EQ(learning_rate(schedule, 1000), 2e-4);
  for (int64_t step = 10; step < 110; ++step)
    EXPECT_LT(learning_rate(schedule, step), learning_rate(schedule, step - 1)) << step;
}

TEST(Schedule, RunsWithoutWarmupAndRunsShorterThanWarmup) {
  EXPECT_NEAR(learning_rate({1.0, 0.0, 0, 2}, 0), 0.5, 1e-15);
  EXPECT_EQ(learning_rate({1.0, 0.0, 0, 2}, 1), 0.0);
  EXPECT_EQ(learning_rate({1.0, 0.0, 0, 1}, 0), 0.0);
  EXPECT_EQ(learning_rate({1.0, 0.1, 50, 20}, 19), 0.4);
}

TEST(Schedule, EqualRatesStayConstant) {
  for (int64_t step = 5; step < 30; ++step) EXPECT_DOUBLE_EQ(learning_rate({1e-3, 1e-3, 5, 30}, step), 1e-3);
}

TEST(Schedule, ConstantStaysAtLrToTheEnd) {
  const Schedule schedule{2e-3, 2e-4, 4, 20, ScheduleShape::kConstant};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1), 1e-3);
  for (int64_t step = 3; step < 25; ++step) EXPECT_EQ(learning_rate(schedule, step), 2e-3) << step;
}

TEST(Schedule, LinearFallsByTheSameAmountEachStep) {
  const Schedule schedule{2e-3, 2e-4, 10, 110, ScheduleShape::kLinear};
  EXPECT_EQ(learning_rate(schedule, 9), 2e-3);
  EXPECT_NEAR(learning_rate(schedule, 59), 1.1e-3, 1e-15);  // half the way
  for (int64_t step = 10; step < 110; ++step)
    EXPECT_NEAR(learning_rate(schedule, step), 2e-3 - 1.8e-5 * static_cast<double>(step - 9), 1e-15) << step;
  EXPECT_EQ(learning_rate(schedule, 109), 2e-4);
  EXPECT_EQ(learning_rate(schedule, 500), 2e-4);
}

TEST(Schedule, WsdIsStableUntilItsLastShare) {
  const Schedule schedule{2e-3, 0, 10, 100, ScheduleShape::kWsd, 0.25};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 4), 1e-3);
  for (int64_t step = 9; step < 75; ++step) EXPECT_EQ(learning_rate(schedule, step), 2e-3) << step;
  for (int64_t step = 75; step < 100; ++step)
    EXPECT_NEAR(learning_rate(schedule, step), 2e-3 * static_cast<double>(99 - step) / 25, 1e-15) << step;
  EXPECT_EQ(learning_rate(schedule, 99), 0.0);
}

TEST(Schedule, WsdDecaysFromTheWarmUpWhereTheShareReachesBehindIt) {
  Schedule schedule{1.0, 0.0, 10, 20, ScheduleShape::kWsd, 1.0};
  Schedule linear = schedule;
  linear.shape = ScheduleShape::kLinear;
  for (int64_t step = 0; step < 25; ++step)
    EXPECT_EQ(learning_rate(schedule, step), learning_rate(linear, step)) << step;
  schedule.decay_share = 1e-6;  // less than a step: the last one still has min_lr
  EXPECT_EQ(learning_rate(schedule, 18), 1.0);
  EXPECT_EQ(learning_rate(schedule, 19), 0.0);
}

TEST(Schedule, ShapesByName) {
  EXPECT_EQ(parse_schedule_shape("cosine"), ScheduleShape::kCosine);
  EXPECT_EQ(parse_schedule_shape("linear"), ScheduleShape::kLinear);
  EXPECT_EQ(parse_schedule_shape("constant"), ScheduleShape::kConstant);
  EXPECT_EQ(parse_schedule_shape("wsd"), ScheduleShape::kWsd);
  EXPECT_THROW(parse_schedule_shape("step"), Error);
}

}  // namespace
}  // namespace fw
