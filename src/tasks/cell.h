// One cell of a task's table: a model of one rule trained on a task with one learning rate and one seed, and judged at several lengths.
//
// Its folder, all written aside and renamed:
//   result.json          when it is finished: what was trained and how, scores by length, the learning curve
//   curve.json           the curve so far; checkpoints/ as of a training run; best/ the model that was best at the training length: all three of one step,
//                        now and then (a twentieth of the time goes into writing), when it is interrupted, and at the end
// A cell that was killed goes on from its checkpoint with the same bits; one process at a time works in it (base/folder_lock.h).
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/language_model.h"
#include "tasks/recipe.h"
#include "tasks/synthetic.h"

namespace fw {

struct TaskPoint {
  int64_t step = 0;     // steps done
  double loss = 0;      // of the labels, in nats, mean over the steps since the point before
  double accuracy = 0;  // micro, of `judged` examples of the training length; of a mixture the mean over its tests, by example (macro)
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
};
nlohmann::json to_json(const TaskResult& result);
// Throws Error(kUsage) naming `where`.
TaskResult task_result_from_json(const nlohmann::json& json, const std::string& where);

// Right answers of a model on examples first ... first + count - 1 of a seed.
TaskAccuracy judge(LanguageModel<float>& model, const SyntheticTask& task, uint64_t seed, int64_t count, const std::atomic<bool>* stop = nullptr);

struct TaskCell {
  std::string task, folder;
  TaskRecipe recipe;  // complete
  ModelConfig model;  // vocab_size: the task's
  double lr = 0;
  uint64_t seed = 0;
  std::string device = "cpu";  // where it runs, as of a training run; a cell of one device goes on on another
  std::string name = {};       // in tables; "": the model's rule
};

// Trains and judges, or goes on with what was begun, and returns true when the cell is finished (at once if it is already); false when
// *stop became true, after a checkpoint. Throws Error(kUsage) when the folder has a cell of other settings, naming the first that differs,
// and Error(kNumeric) after 10 steps in a row whose loss or norm is not finite.
// on_step: after every step of training, with the steps done.
bool run_cell(const TaskCell& cell, const std::function<void(const TaskPoint&)>& on_point, const std::atomic<bool>* stop,
              const std::function<void(int64_t)>& on_step = {});
// The cell's result, if it is finished.
bool read_result(const std::string& folder, TaskResult& result);

}  // namespace fw
