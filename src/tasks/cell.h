// One cell of a task's table: a model of one rule trained on a task with one learning rate and one seed, and judged at
// several lengths.
//
// Its folder, all written aside and renamed:
//   result.json          when it is finished: what was trained and how, scores by length, the learning curve
//   curve.json           the curve so far; checkpoints/ as of a training run; best/ the model that was best at the training length: all three of one step,
//                        now and then (a twentieth of the time goes into writing), when it is interrupted, and at the
// end A file that is not what this program writes is said to be damaged. A result is made again from the checkpoint; of
// anything else the error names the folder.
//
// A cell that was killed goes on from its checkpoint with the same bits; one process at a time works in it
// (base/folder_lock.h).
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "model/language_model.h"
#include "tasks/cell_result.h"
#include "tasks/recipe.h"
#include "tasks/synthetic.h"

namespace fw {

// Right answers of a model on examples first ... first + count - 1 of a seed.
TaskAccuracy judge(LanguageModel<float>& model, const SyntheticTask& task, uint64_t seed, int64_t count,
                   const std::atomic<bool>* stop = nullptr);

struct TaskCell {
  std::string task, folder;
  TaskRecipe recipe;  // complete
  ModelConfig model;  // vocab_size: the task's
  double lr = 0;
  uint64_t seed = 0;
  std::string device = "cpu";  // where it runs, as of a training run; a cell of one device goes on on another
  std::string name = {};       // in tables; "": the model's rule
  Provenance provenance = {};  // of this process; the result has it with the day of its end
};

// Thrown for a cell whose files are not what this program writes; it says which, and that the cell is done anew when
// its folder is removed.
class CellDamaged : public Error {
 public:
  CellDamaged(const std::string& folder, const std::string& why);
};

// Trains and judges, or goes on with what was begun, and returns true when the cell is finished (at once if it is
// already); false when *stop became true, after a checkpoint. Throws Error(kUsage) when the folder has a cell of other
// settings, naming the first that differs, CellDamaged, and Error(kNumeric) after 10 steps in a row whose loss or norm
// is not finite.
// on_note is told of a damaged file that is made again; on_step, after every step of training, of the steps done.
bool run_cell(const TaskCell& cell, const std::function<void(const TaskPoint&)>& on_point,
              const std::atomic<bool>* stop, const std::function<void(const std::string&)>& on_note = {},
              const std::function<void(int64_t)>& on_step = {});
// The cell's result, if it is finished. Throws CellDamaged.
bool read_result(const std::string& folder, TaskResult& result);

}  // namespace fw
