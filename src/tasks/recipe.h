// How a task is trained and judged: the papers' settings, each of which can be set otherwise.
#pragma once

#include <string>
#include <vector>

#include "base/keys.h"
#include "model/config.h"
#include "tasks/synthetic.h"

namespace fw {

struct TaskRecipe {  // the keys are a list, recipe.def
#define FW_KEY FW_KEY_MEMBER
#include "tasks/recipe.def"
#undef FW_KEY
};
// Here, so that readers of results need no tasks.
inline KeyTables key_tables(TaskRecipe& c) {
#define FW_KEY FW_KEY_ENTRY
  return {{"task",
           "Task",
           {
#include "tasks/recipe.def"
           }}};
#undef FW_KEY
}

// Puts the paper's values where `recipe` has 0. Throws Error(kUsage) for an unknown task, for values out of range, and
// for lengths (the training length and those of the judgement) at which the task cannot be drawn.
void complete(TaskRecipe& recipe, const std::string& task);
// Of a length (0: the training length) and a number of pairs (0: the recipe's).
std::unique_ptr<SyntheticTask> task_of(const TaskRecipe& recipe, const std::string& task, int64_t length = 0,
                                       int64_t pairs = 0);

// What a complete recipe trains on: its segments, or one of its length with pairs 0 (the recipe's).
std::vector<TaskSegment> training_segments(const TaskRecipe& recipe);
// Where the trained model is judged: --tests, or lengths with pairs 0.
struct TestPoint {
  int64_t length, pairs;
};
std::vector<TestPoint> test_points(const TaskRecipe& recipe);
// Steps of one time round the examples.
int64_t steps_per_round(const TaskRecipe& recipe);
// Of a step, 0 the first.
double task_learning_rate(const TaskRecipe& recipe, double lr, int64_t step);

// The model of the papers' experiments on a task: two layers, with the head dimensions that their programs have (48 and
// 96, not the 128 that is written). vocab_size is the task's.
ModelConfig task_model(const std::string& task);

// Rule and layers of a model by its name in a table. The name is a rule, a kind of layer (attention), or X+KIND, layers
// of X, a rule or a kind, and of another kind in turn. Throws Error(kUsage) where the name says layers and the model
// has them already.
void set_mixers(ModelConfig& model, const std::string& name);

}  // namespace fw
