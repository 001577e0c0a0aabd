// The result of a cell (cell.h), and how it stands in files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/provenance.h"
#include "model/config.h"
#include "tasks/recipe.h"
#include "tasks/synthetic.h"

namespace fw {

struct TaskPoint {
  int64_t step = 0;  // steps done
  double loss = 0;   // of the labels, in nats, mean over the steps since the point before
  // micro, of `judged` examples of the training length; of a mixture the mean over its tests, by example (macro)
  double accuracy = 0;
};

struct TaskScore {
  int64_t length = 0;  // as the recipe has it
  int64_t pairs = 0;   // of a mixture's tests; 0: the recipe's
  TaskAccuracy accuracy;
  double ceiling = -1;  // of a last-write memory (synthetic.h) on the same examples; < 0: the task has none
};

struct TaskResult {
  std::string task, rule;
  TaskRecipe recipe;
  ModelConfig model;
  double lr = 0;
  uint64_t seed = 0;
  double parameters = 0;
  int64_t steps = 0, skipped = 0;  // done; of these not finite
  int64_t judged_step = 0;         // of the model that was judged
  double seconds = 0;              // of training and judging, all processes together
  std::vector<TaskPoint> curve;
  std::vector<TaskScore> scores;
  Provenance provenance;
};
nlohmann::json to_json(const TaskResult& result);
// Throws Error(kUsage) naming `where` for what is no result: a key that is missing or of the wrong type, no scores, a
// score of no length.
TaskResult task_result_from_json(const nlohmann::json& json, const std::string& where);

// The settings of a cell, by which it is known again.
nlohmann::json settings_to_json(const std::string& task, TaskRecipe recipe, const ModelConfig& model, double lr,
                                uint64_t seed);
// "recipe.steps (there: 100, here: 200)" of the first setting of `here` that differs; "" when all are the same. Throws
// Error(kUsage) naming `where` when `there` are no settings.
std::string settings_difference(const nlohmann::json& there, const nlohmann::json& here, const std::string& where);

nlohmann::json curve_to_json(const std::vector<TaskPoint>& curve);
// Throws Error(kUsage) naming `where`.
std::vector<TaskPoint> curve_from_json(const nlohmann::json& points, const std::string& where);

}  // namespace fw
