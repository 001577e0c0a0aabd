#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace fw {
namespace {

TEST(Schedule, WarmsUpLinearlyAndReachesLrAtTheLastWarmupStep) {
  const Schedule schedule{2e-3, 2e-4, 10, 100};
  for (int64_t step = 0; step < 10; ++step) EXPECT_DOUBLE_EQ(learning_rate(schedule, step), 2e-3 * static_cast<double>(step + 1) / 10);
}

TEST(Schedule, FallsAsHalfACosineToMinLrAtTheLastStep) {
  const Schedule schedule{2e-3, 2e-4, 10, 110};
  // A quarter, half and three quarters of the way from the last warm-up step (9) to the last step (109).
  EXPECT_NEAR(learning_rate(schedule, 34), 2e-4 + 1.8e-3 * 0.5 * (1 + std::numbers::sqrt2 / 2), 1e-15);
  EXPECT_NEAR(learning_rate(schedule, 59), 1.1e-3, 1e-15);
  EXPECT_NEAR(learning_rate(schedule, 84), 2e-4 + 1.8e-3 * 0.5 * (1 - std::numbers::sqrt2 / 2), 1e-15);
  EXPECT_EQ(learning_rate(schedule, 109), 2e-4);
  EXPECT_EQ(learning_rate(schedule, 1000), 2e-4);
  for (int64_t step = 10; step < 110; ++step) EXPECT_LT(learning_rate(schedule, step), learning_rate(schedule, step - 1)) << step;
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

}  // namespace
}  // namespace fw
