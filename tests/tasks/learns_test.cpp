// Every synthetic task is learnt on a small setting, in seconds. Settings, chance and what was reached stand in docs/tasks.md. The bounds lie below what was
// reached because instruction sets round differently (tried with DNNL_MAX_CPU_ISA from SSE41 up), and far above chance and what a model reaches that has not
// found the rule.
#include <gtest/gtest.h>

#include "base/temp_folder.h"
#include "tasks/cell.h"

namespace fw {
namespace {

// gated_deltanet, two layers, two heads; judged on 200 examples of the training length.
TaskCell small_cell(const testing::TempFolder& folder, const std::string& task, int64_t vocabulary, int64_t pairs, int64_t length, int64_t width,
                    int64_t steps) {
  TaskCell cell;
  cell.task = task;
  cell.folder = folder.path("cell");
  cell.recipe.vocabulary = vocabulary;
  cell.recipe.pairs = pairs;
  cell.recipe.length = length;
  cell.recipe.lengths = {length};
  cell.recipe.steps = cell.recipe.eval_every = steps;
  cell.recipe.batch = 16;
  cell.recipe.judged = 200;
  complete(cell.recipe, task);
  cell.model = task_model(task);
  cell.model.rule = "gated_deltanet";
  cell.model.vocab_size = task_of(cell.recipe, task)->vocab_size();
  cell.model.hidden_size = width;
  cell.model.num_heads = 2;
  cell.model.head_dim = width / 2;
  cell.model.intermediate_size = 2 * width;
  cell.lr = 3e-3;
  cell.seed = 1;
  return cell;
}
double accuracy_of(const TaskCell& cell) {
  EXPECT_TRUE(run_cell(cell, {}, nullptr));
  TaskResult result;
  EXPECT_TRUE(read_result(cell.folder, result));
  return result.scores.at(0).accuracy.micro;
}
double reached(const std::string& task, int64_t vocabulary, int64_t pairs, int64_t length, int64_t width, int64_t steps) {
  const testing::TempFolder folder;
  return accuracy_of(small_cell(folder, task, vocabulary, pairs, length, width, steps));
}

TEST(Learns, OnePair) { EXPECT_GT(reached("one_pair", 64, 1, 24, 32, 800), 0.9); }           // chance 3%
TEST(Learns, Mqar) { EXPECT_GT(reached("mqar", 64, 4, 24, 64, 1200), 0.7); }                 // chance 3%, a last-write memory 88%
TEST(Learns, MqarZoology) { EXPECT_GT(reached("mqar_zoology", 16, 3, 24, 64, 1000), 0.9); }  // chance 13%, a last-write memory 80%
TEST(Learns, Palindrome) { EXPECT_GT(reached("palindrome", 0, 0, 6, 32, 600), 0.8); }        // chance 1%
TEST(Learns, Stack) { EXPECT_GT(reached("stack", 0, 0, 24, 64, 1000), 0.8); }                // chance 4%

// The needle is found all at once after a time at chance whose length the rounding decides (docs/tasks.md): training ends when it is found.
TEST(Learns, Needle) {
  const testing::TempFolder folder;
  TaskCell cell = small_cell(folder, "niah_single_1", 0, 0, 1, 64, 4000);
  cell.recipe.batch = 4;
  cell.recipe.eval_every = 200;
  cell.recipe.enough = 0.6;
  cell.lr = 2e-3;
  cell.seed = 2;
  EXPECT_GT(accuracy_of(cell), 0.4);  // chance 10%
}

// Needles in 40 words of an essay; label long (tests/CMakeLists.txt). The larger batches are what finds them.
double reached_in_essay(const std::string& task, int64_t batch, double lr) {
  const testing::TempFolder folder;
  TaskCell cell = small_cell(folder, "niah_single_1", 0, 0, 1, 64, 4000);
  cell.task = task;
  cell.recipe.haystack = FW_SOURCE_DIR "/tests/tasks/essay.txt";
  cell.recipe.length = 40;
  cell.recipe.lengths = {40};
  cell.recipe.batch = batch;
  cell.recipe.eval_every = 200;
  cell.recipe.enough = 0.6;
  cell.model.vocab_size = task_of(cell.recipe, task)->vocab_size();
  cell.lr = lr;
  return accuracy_of(cell);
}
TEST(LearnsLong, NeedleInAnEssay) { EXPECT_GT(reached_in_essay("niah_single_2", 16, 3e-3), 0.4); }              // chance 10%
TEST(LearnsLong, UuidInAnEssay) { EXPECT_GT(reached_in_essay("niah_single_3", 32, 2e-3), 0.4); }                // chance 10%
TEST(LearnsLong, OneOfFourNeedlesInAnEssay) { EXPECT_GT(reached_in_essay("niah_multikey_1", 16, 3e-3), 0.4); }  // chance 10%, any of the four 33%

}  // namespace
}  // namespace fw
