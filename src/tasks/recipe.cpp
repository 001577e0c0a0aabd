#include "tasks/recipe.h"

#include "base/error.h"

namespace fw {

KeyTables key_tables(TaskRecipe& c) {
#define FW_KEY FW_KEY_ENTRY
  return {{"task",
           "Task",
           {
#include "tasks/recipe.def"
           }}};
#undef FW_KEY
}

std::unique_ptr<SyntheticTask> task_of(const TaskRecipe& recipe, const std::string& task, int64_t length) {
  return make_task(task, {.length = length == 0 ? recipe.length : length,
                          .pairs = recipe.pairs,
                          .vocab_size = recipe.vocabulary,
                          .passes = recipe.passes,
                          .power = recipe.power,
                          .noise = recipe.noise,
                          .first = recipe.first});
}

void complete(TaskRecipe& recipe, const std::string& task) {
  check_ranges(key_tables(recipe));
  const TaskOptions standard = default_options(task);
  // Kaczmarz Linear Attention's settings; mqar_zoology takes as many steps as Zoology's 32 passes over 180,000 examples in batches of 256.
  const bool whole_sequence = task == "palindrome" || task == "stack";
  if (recipe.length == 0) recipe.length = standard.length;
  if (recipe.steps == 0) recipe.steps = task == "mqar_zoology" ? 22500 : whole_sequence ? 20000 : 10000;
  if (recipe.eval_every == 0) recipe.eval_every = whole_sequence ? 500 : 200;
  if (recipe.lengths.empty()) {
    recipe.lengths = whole_sequence ? IntList{256, 512, 1024, 2048} : IntList{recipe.length, 2 * recipe.length, 4 * recipe.length, 8 * recipe.length};
  }
  for (const int64_t length : recipe.lengths) {
    if (length < 1) fail_usage("lengths: expected lengths of at least 1, got {}", length);
    task_of(recipe, task, length);
  }
  task_of(recipe, task);
}

ModelConfig task_model(const std::string& task) {
  ModelConfig model;
  const bool whole_sequence = task == "palindrome" || task == "stack";
  model.hidden_size = 256;
  model.num_hidden_layers = 2;
  model.num_heads = whole_sequence ? 2 : 4;
  model.head_dim = whole_sequence ? 96 : 48;
  model.expand_v = 2;
  model.intermediate_size = 1024;
  model.init = "normal";
  model.vocab_size = 0;
  return model;
}

}  // namespace fw
