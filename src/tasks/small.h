// Settings at which every synthetic task is learnt within two minutes on two cores: what `sweep TASK --small` runs, and
// what the tests hold it to (tests/tasks/learns_test.cpp).
#pragma once

#include <cstdint>
#include <string>

#include "tasks/recipe.h"

namespace fw {

struct SmallTask {
  TaskRecipe recipe;  // complete, but for the haystack of the tasks that need one
  ModelConfig model;  // two layers, two heads; rule and vocab_size are the caller's
  double lr = 0;
  uint64_t seed = 1;
  double chance = 0;  // accuracy of a guess
};

// Throws Error(kUsage) for an unknown task, and for one that hides its needles in a text where `haystack` is "".
SmallTask small_task(const std::string& task, const std::string& haystack = "");

}  // namespace fw
