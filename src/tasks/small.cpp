#include "tasks/small.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace fw {
namespace {

struct Setting {
  const char* task;
  int64_t vocabulary, pairs, length, width, steps, batch, eval_every;
  double lr, enough, chance;
  uint64_t seed;
};

// A needle is found all at once after a time at chance: training ends when it is found (`enough`). Needles in an essay
// want larger batches.
constexpr Setting kSettings[] = {
    {"one_pair", 64, 1, 24, 32, 800, 16, 100, 3e-3, 0, 1.0 / 32, 1},
    {"mqar", 64, 4, 24, 64, 1200, 16, 100, 3e-3, 0, 1.0 / 32, 1},
    {"mqar_zoology", 16, 3, 24, 64, 1000, 16, 100, 3e-3, 0, 1.0 / 8, 1},
    {"palindrome", 0, 0, 6, 32, 600, 16, 100, 3e-3, 0, 0.01, 1},
    {"stack", 0, 0, 24, 64, 1000, 16, 100, 3e-3, 0, 0.04, 1},
    {"niah_single_1", 0, 0, 1, 64, 4000, 4, 200, 2e-3, 0.6, 0.1, 2},
    {"niah_single_2", 0, 0, 40, 64, 4000, 16, 200, 3e-3, 0.6, 0.1, 1},
    {"niah_single_3", 0, 0, 40, 64, 4000, 32, 200, 2e-3, 0.6, 0.1, 1},
    {"niah_multikey_1", 0, 0, 40, 64, 4000, 16, 200, 3e-3, 0.6, 0.1, 1},
};

}  // namespace

SmallTask small_task(const std::string& task, const std::string& haystack) {
  default_options(task);  // an unknown task is named here
  const auto* const found =
      std::find_if(std::begin(kSettings), std::end(kSettings), [&](const Setting& s) { return task == s.task; });
  if (found == std::end(kSettings)) fail_internal("small_task: no settings of '{}'", task);
  SmallTask small;
  small.recipe.vocabulary = found->vocabulary;
  small.recipe.pairs = found->pairs;
  small.recipe.length = found->length;
  small.recipe.lengths = {found->length};
  small.recipe.steps = found->steps;
  small.recipe.eval_every = found->eval_every;
  small.recipe.batch = found->batch;
  small.recipe.judged = 200;
  small.recipe.enough = found->enough;
  small.recipe.haystack = haystack;
  complete(small.recipe, task);
  small.model = task_model(task);
  small.model.hidden_size = found->width;
  small.model.num_heads = 2;
  small.model.head_dim = found->width / 2;
  small.model.intermediate_size = 2 * found->width;
  small.lr = found->lr;
  small.seed = found->seed;
  small.chance = found->chance;
  return small;
}

}  // namespace fw
