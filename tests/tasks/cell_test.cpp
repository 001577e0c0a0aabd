// Cells of a task: they learn, go on where they were stopped with the same bits, are not done twice, and refuse other
// settings.
#include "tasks/cell.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/temp_folder.h"
#include "support/error_of.h"

namespace fw {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

TaskCell small_cell(const std::string& folder) {
  TaskCell cell;
  cell.task = "palindrome";
  cell.folder = folder;
  cell.recipe.length = 3;
  cell.recipe.lengths = {3, 5};
  cell.recipe.steps = 24;
  cell.recipe.batch = 4;
  cell.recipe.examples = 40;
  cell.recipe.judged = 20;
  cell.recipe.eval_every = 7;
  complete(cell.recipe, cell.task);
  cell.model = task_model(cell.task);
  cell.model.rule = "gated_deltanet";
  cell.model.hidden_size = 16;
  cell.model.num_heads = 2;
  cell.model.head_dim = 4;
  cell.model.intermediate_size = 16;
  cell.model.vocab_size = 128;
  cell.lr = 3e-3;
  cell.seed = 5;
  return cell;
}

std::string result_without_time(const std::string& folder) {
  auto json = nlohmann::json::parse(read_file(folder + "/result.json"));
  json.erase("seconds");
  return json.dump();
}

TEST(TaskCell, GoesOnWhereItWasStoppedWithTheSameBits) {
  const testing::TempFolder folder;
  const TaskCell whole = small_cell(folder.path("whole"));
  std::vector<int64_t> steps;
  ASSERT_TRUE(run_cell(
      whole, [&](const TaskPoint& p) { steps.push_back(p.step); }, nullptr));
  EXPECT_THAT(steps, ::testing::ElementsAre(7, 14, 21, 24));

  // Stopped at every point of its curve, each time in a process of its own, as far as files go.
  const TaskCell cut = small_cell(folder.path("cut"));
  std::atomic<bool> stop{false};
  int rounds = 0;
  while (!run_cell(
      cut, [&](const TaskPoint&) { stop = true; }, &stop)) {
    EXPECT_FALSE(file_exists(cut.folder + "/result.json"));
    stop = false;
    ASSERT_LT(++rounds, 10);
  }
  EXPECT_GE(rounds, 3);
  EXPECT_EQ(result_without_time(cut.folder), result_without_time(whole.folder));
}

TEST(TaskCell, ACheckpointThatIsLostOrDamagedCostsTimeOnly) {
  const testing::TempFolder folder;
  const TaskCell whole = small_cell(folder.path("whole"));
  ASSERT_TRUE(run_cell(whole, {}, nullptr));
  for (const bool damaged : {false, true}) {
    const TaskCell cut = small_cell(folder.path(damaged ? "damaged" : "lost"));
    std::atomic<bool> stop{false};
    int points = 0;
    ASSERT_FALSE(run_cell(
        cut, [&](const TaskPoint&) { stop = ++points == 2; }, &stop));
    const std::string newest = cut.folder + "/checkpoints/step-14";
    ASSERT_TRUE(file_exists(newest + "/trainer.json"));
    if (damaged) {
      std::ofstream(newest + "/model.safetensors", std::ios::app) << "x";
    } else {
      std::filesystem::remove_all(newest);
    }
    ASSERT_TRUE(run_cell(cut, {}, nullptr));
    EXPECT_EQ(result_without_time(cut.folder), result_without_time(whole.folder)) << damaged;
  }
}

TEST(TaskCell, AFinishedOneIsNotDoneAgainAndOtherSettingsAreRefused) {
  const testing::TempFolder folder;
  TaskCell cell = small_cell(folder.path("cell"));
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  const std::string before = read_file(cell.folder + "/result.json");
  int points = 0;
  ASSERT_TRUE(run_cell(
      cell, [&](const TaskPoint&) { ++points; }, nullptr));
  EXPECT_EQ(points, 0);
  EXPECT_EQ(read_file(cell.folder + "/result.json"), before);

  cell.recipe.steps = 25;
  EXPECT_THAT(error_of([&] { run_cell(cell, {}, nullptr); }), HasSubstr("recipe.steps (there: 24, here: 25)"));
  cell.recipe.steps = 24;
  cell.model.hidden_size = 32;
  EXPECT_THAT(error_of([&] { run_cell(cell, {}, nullptr); }), HasSubstr("model.hidden_size (there: 16, here: 32)"));
  EXPECT_EQ(read_file(cell.folder + "/result.json"), before);
}

TEST(TaskCell, OneProcessAtATime) {
  const testing::TempFolder folder;
  const TaskCell cell = small_cell(folder.path("cell"));
  make_folders(cell.folder);
  const FolderLock other(cell.folder);
  EXPECT_THROW(run_cell(cell, {}, nullptr), FolderLocked);
  EXPECT_FALSE(file_exists(cell.folder + "/curve.json"));
}

TEST(TaskCell, PatienceEndsTrainingAndTheBestModelIsJudged) {
  const testing::TempFolder folder;
  TaskCell cell = small_cell(folder.path("cell"));
  cell.lr = 1e-9;  // nothing is learned: no evaluation is better than the first
  cell.recipe.patience = 2;
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  TaskResult result;
  ASSERT_TRUE(read_result(cell.folder, result));
  EXPECT_EQ(result.steps, 21);
  EXPECT_EQ(result.judged_step, 7);
  EXPECT_EQ(result.curve.size(), 3u);
  ASSERT_EQ(result.scores.size(), 2u);
  EXPECT_EQ(result.scores[0].accuracy.labels, 20 * 3);
  EXPECT_EQ(result.scores[1].accuracy.labels, 20 * 5);
  EXPECT_LT(result.scores[0].ceiling, 0);
}

// 300 steps of a few milliseconds: one pair among 16 tokens, whose answer is always the second.
TEST(TaskCell, ASmallTaskIsLearned) {
  const testing::TempFolder folder;
  TaskCell cell = small_cell(folder.path("cell"));
  cell.task = "one_pair";
  cell.recipe = {};
  cell.recipe.length = 12;
  cell.recipe.vocabulary = 16;
  cell.recipe.steps = 300;
  cell.recipe.batch = 16;
  cell.recipe.examples = 2000;
  cell.recipe.eval_every = 100;
  cell.recipe.judged = 200;
  cell.recipe.lengths = {12, 24};
  complete(cell.recipe, cell.task);
  cell.model.hidden_size = 32;
  cell.model.head_dim = 8;
  cell.model.intermediate_size = 32;
  cell.model.vocab_size = 16;
  cell.lr = 5e-3;
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  TaskResult result;
  ASSERT_TRUE(read_result(cell.folder, result));
  EXPECT_GT(result.scores[0].accuracy.micro, 0.9);  // chance: 0.125 of the values
  EXPECT_GT(result.scores[0].ceiling, 0.3);
  EXPECT_LT(result.scores[0].ceiling, 0.9);  // noise repeats the key
}

TaskCell small_mixture(const std::string& folder) {
  TaskCell cell = small_cell(folder);
  cell.task = "mqar_zoology";
  cell.recipe = {};
  cell.recipe.segments = {"12x2x10", "16x3x5"};  // batches of 4: 3 and 2 steps
  cell.recipe.tests = {"12x2", "12x3", "20x4"};
  cell.recipe.vocabulary = 32;
  cell.recipe.batch = 4;
  cell.recipe.steps = 15;
  cell.recipe.judged = 20;
  cell.recipe.schedule = "cosine";
  complete(cell.recipe, cell.task);
  cell.model.vocab_size = 32;
  return cell;
}

TEST(TaskCell, AMixtureIsOneRunThatGoesOnWithTheSameBits) {
  const testing::TempFolder folder;
  const TaskCell whole = small_mixture(folder.path("whole"));
  std::vector<int64_t> steps;
  ASSERT_TRUE(run_cell(
      whole, [&](const TaskPoint& p) { steps.push_back(p.step); }, nullptr));
  EXPECT_THAT(steps, ::testing::ElementsAre(5, 10, 15));  // after each time round
  TaskResult result;
  ASSERT_TRUE(read_result(whole.folder, result));
  ASSERT_EQ(result.scores.size(), 3u);
  EXPECT_EQ(result.scores[1].length, 12);
  EXPECT_EQ(result.scores[1].pairs, 3);
  EXPECT_EQ(result.scores[1].accuracy.labels, 20 * 3);
  EXPECT_EQ(result.scores[2].accuracy.labels, 20 * 4);

  const TaskCell cut = small_mixture(folder.path("cut"));
  std::atomic<bool> stop{false};
  ASSERT_FALSE(run_cell(
      cut, [&](const TaskPoint& p) { stop = p.step == 5; }, &stop));
  ASSERT_TRUE(run_cell(cut, {}, nullptr));
  EXPECT_EQ(result_without_time(cut.folder), result_without_time(whole.folder));
}

TEST(TaskRecipe, ZoologysMixture) {
  TaskRecipe recipe;
  recipe.segments = recipe.tests = {"zoology"};
  recipe.batch = 256;
  recipe.schedule = "cosine";
  complete(recipe, "mqar_zoology");
  EXPECT_EQ(recipe.segments,
            (StringList{"64x4x100000", "128x8x20000", "256x16x20000", "256x32x20000", "256x64x20000"}));
  EXPECT_EQ(recipe.tests.back(), "1024x256");
  EXPECT_EQ(steps_per_round(recipe), 707);  // as Zoology's program has them
  EXPECT_EQ(recipe.steps, 32 * 707);
  EXPECT_EQ(recipe.eval_every, 707);
  // A cosine over 32 rounds that is lowered between rounds only.
  EXPECT_EQ(task_learning_rate(recipe, 0.01, 0), 0.01);
  EXPECT_EQ(task_learning_rate(recipe, 0.01, 706), 0.01);
  EXPECT_NEAR(task_learning_rate(recipe, 0.01, 16 * 707), 0.005, 1e-12);
  EXPECT_NEAR(task_learning_rate(recipe, 0.01, recipe.steps - 1), 0.01 * (1 + std::cos(3.14159265358979 * 31 / 32)) / 2,
              1e-9);
}

TEST(TaskRecipe, MixturesThatCannotBe) {
  const auto refused = [](TaskRecipe recipe, const std::string& task = "mqar_zoology") {
    return error_of([&] { complete(recipe, task); });
  };
  EXPECT_THAT(refused({.segments = {"64x4"}}),
              HasSubstr("segments: expected LENGTHxPAIRSxCOUNT or zoology, with commas between them, got '64x4'"));
  for (const char* bad : {"64x4x0", "64x4x", "axbxc", "64x4x5x6", "64x-4x5", ""})
    EXPECT_THAT(refused({.segments = {bad}}), HasSubstr("segments: expected")) << bad;
  EXPECT_THAT(refused({.segments = {"64x4x10"}, .tests = {"64"}}), HasSubstr("tests: expected LENGTHxPAIRS"));
  EXPECT_THAT(refused({.segments = {"12x4x10"}}), HasSubstr("length: expected an even number of at least"));
  EXPECT_THAT(refused({.segments = {"64x4x10"}}, "mqar"), HasSubstr("by mqar_zoology only, not by mqar"));
  EXPECT_THAT(refused({.lengths = {64}, .segments = {"64x4x10"}}), HasSubstr("--tests"));
  EXPECT_THAT(refused({.tests = {"64x4"}}), HasSubstr("--segments"));
}

TEST(TaskCell, EnoughEndsTraining) {
  const testing::TempFolder folder;
  TaskCell cell = small_mixture(folder.path("cell"));
  cell.recipe.vocabulary = cell.model.vocab_size = 16;
  cell.recipe.segments = {"12x2x10"};
  cell.recipe.tests = {"12x2"};
  cell.recipe.enough = 1e-6;
  cell.recipe.judged = 500;  // among so many one is right by chance
  complete(cell.recipe, cell.task);
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  TaskResult result;
  ASSERT_TRUE(read_result(cell.folder, result));
  EXPECT_EQ(result.curve.size(), 1u);
  EXPECT_LT(result.steps, cell.recipe.steps);
}

// A sweep that an earlier version began has none of the keys that came since.
TEST(TaskCell, ResultsOfARecipeWithFewerKeysAreItsOwn) {
  const testing::TempFolder folder;
  const TaskCell cell = small_cell(folder.path("cell"));
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  auto json = nlohmann::json::parse(read_file(cell.folder + "/result.json"));
  for (const char* key : {"segments", "tests", "schedule", "enough"}) json["recipe"].erase(key);
  write_file_atomic(cell.folder + "/result.json", json.dump());
  EXPECT_TRUE(run_cell(cell, {}, nullptr));
}

// As the papers' runs have it: norms, biases and decay rates too.
TEST(TaskCell, EveryParameterDecays) {
  LanguageModel<float> model(small_cell("").model);
  const auto exempt = [&] {
    const ParamPieces pieces = model.params().pieces();
    return std::count_if(pieces.data, pieces.data + pieces.count,
                         [](const ParamPiece& piece) { return piece.decay == 0; });
  };
  EXPECT_GT(exempt(), 0);
  model.params().decay_all();
  EXPECT_EQ(exempt(), 0);
}

// Valid JSON of another kind, files that are cut, models that are damaged: the error names the folder and what to do,
// and nothing crashes.
TEST(TaskCell, DamagedFilesAreNamed) {
  const testing::TempFolder folder;
  const TaskCell whole = small_cell(folder.path("whole"));
  ASSERT_TRUE(run_cell(whole, {}, nullptr));
  const auto result = nlohmann::json::parse(read_file(whole.folder + "/result.json"));
  const auto curve = nlohmann::json::parse(read_file(whole.folder + "/curve.json"));
  int tries = 0;
  // A file of the cell as `text`: with its curve a result is made again, to the same numbers; without it, and of a
  // curve, the folder is named.
  const auto damaged = [&](const char* name, const std::string& text, bool with_curve) {
    const TaskCell cell = small_cell(folder.path("cell-" + std::to_string(++tries)));
    std::filesystem::copy(whole.folder, cell.folder, std::filesystem::copy_options::recursive);
    if (std::string(name) == "curve.json" || !with_curve)
      std::filesystem::remove(cell.folder + (with_curve ? "/result.json" : "/curve.json"));
    write_file_atomic(cell.folder + "/" + name, text);
    std::vector<std::string> notes;
    const std::string error =
        error_of([&] { run_cell(cell, {}, nullptr, [&](const std::string& note) { notes.push_back(note); }); });
    if (std::string(name) == "result.json" && with_curve) {
      EXPECT_EQ(error, "") << text;
      ASSERT_EQ(notes.size(), 1u) << text;
      EXPECT_THAT(notes[0], HasSubstr("made again from its checkpoint"));
      EXPECT_EQ(result_without_time(cell.folder), result_without_time(whole.folder)) << text;
    } else {
      EXPECT_THAT(error, HasSubstr("the cell '" + cell.folder + "' is damaged")) << text;
      EXPECT_THAT(error, HasSubstr("Remove the folder")) << text;
    }
  };
  const auto with = [](nlohmann::json json, const char* key, const nlohmann::json& value) {
    json[key] = value;
    return json.dump();
  };
  for (const char* text : {"[]", "5", "null", "\"x\"", "{}", "", "{\"scores\""}) {
    damaged("result.json", text, true);
    damaged("result.json", text, false);
    damaged("curve.json", text, true);
  }
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, nlohmann::json>>{{"scores", nlohmann::json::array()},
                                                           {"scores", {{{"length", nullptr}}}},
                                                           {"curve", 5},
                                                           {"seconds", "x"},
                                                           {"recipe", nlohmann::json::array()},
                                                           {"model", nullptr},
                                                           {"lr", "1"}}) {
    damaged("result.json", with(result, key, value), true);
  }
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, nlohmann::json>>{{"settings", nlohmann::json::array()},
                                                           {"settings", {{"recipe", 5}}},
                                                           {"seconds", "x"},
                                                           {"curve", 5},
                                                           {"curve", {{{"step", "x"}}}},
                                                           {"curve", nullptr}}) {
    damaged("curve.json", with(curve, key, value), true);
  }
  // Points of a curve without an accuracy.
  damaged("curve.json", with(curve, "curve", {{{"step", 7}, {"loss", 1.0}, {"accuracy", nullptr}}}), true);
  // The best model, where it is another than the last.
  TaskCell best = small_cell(folder.path("best"));
  best.lr = 1e-9;
  best.recipe.patience = 2;
  ASSERT_TRUE(run_cell(best, {}, nullptr));
  std::filesystem::remove(best.folder + "/result.json");
  std::ofstream(best.folder + "/best/config.json") << "{}";
  EXPECT_THAT(error_of([&] { run_cell(best, {}, nullptr); }), HasSubstr("the cell '" + best.folder + "' is damaged"));
}

TEST(TaskCell, WhatAKilledProcessLeftAsideGoes) {
  const testing::TempFolder folder;
  const TaskCell cell = small_cell(folder.path("cell"));
  make_folders(cell.folder + "/best");
  for (const char* name : {"/best/model.safetensors.tmp-0123456789ab", "/result.json.tmp-ba9876543210"})
    std::ofstream(cell.folder + name) << "half";
  ASSERT_TRUE(run_cell(cell, {}, nullptr));
  EXPECT_FALSE(file_exists(cell.folder + "/best/model.safetensors.tmp-0123456789ab"));
  EXPECT_FALSE(file_exists(cell.folder + "/result.json.tmp-ba9876543210"));
}

TEST(TaskRecipe, NumbersThatNoProductHolds) {
  const auto refused = [](TaskRecipe recipe, const std::string& task = "mqar_zoology") {
    return error_of([&] { complete(recipe, task); });
  };
  EXPECT_THAT(refused({.segments = {"64x4x9223372036854775807"}, .tests = {"64x4"}}),
              HasSubstr("segments: expected numbers of at most 1099511627776"));
  EXPECT_THAT(refused({.lengths = {int64_t{1} << 62}}, "mqar"), HasSubstr("lengths: expected at most"));
  EXPECT_THAT(refused({.steps = int64_t{1} << 62}, "mqar"), HasSubstr("steps: expected at most"));
  EXPECT_THAT(refused({.batch = int64_t{1} << 62}, "mqar"), HasSubstr("batch: expected at most"));
}

TEST(TaskCell, AResultComesBackFromItsFile) {
  TaskResult result;
  result.task = "mqar";
  result.rule = "kaczmarz";
  result.recipe.lengths = {256, 512};
  result.model = task_model("mqar");
  result.model.vocab_size = 8192;
  result.model.rule = "kaczmarz";
  result.lr = 1e-3;
  result.seed = 7;
  result.parameters = 4.5e6;
  result.steps = 10, result.skipped = 1, result.judged_step = 9, result.seconds = 2.5;
  result.curve = {{5, 3.25, 0.5}, {10, std::nan(""), 0.75}};
  result.scores = {{256, 0, {100, 50, 0.5, 0.51}, 0.9}, {512, 64, {100, 25, 0.25, 0.26}, -1}};
  result.provenance = {"fastweight 1", "fastweight sweep mqar", "NVIDIA H200", "2026-12-01"};
  nlohmann::json json = nlohmann::json::parse(to_json(result).dump());
  EXPECT_EQ(to_json(task_result_from_json(json, "x")).dump(), json.dump());  // NaN is null in a file
  json.erase("provenance");                                                  // as results of earlier versions are
  const Provenance unknown = task_result_from_json(json, "x").provenance;
  EXPECT_EQ(unknown.program + unknown.command + unknown.device + unknown.date, "");
  json["provenance"] = {{"program", 3}};
  EXPECT_THAT(error_of([&] { task_result_from_json(json, "'f'"); }), HasSubstr("'f': not the result of a task"));
  EXPECT_THAT(error_of([] {
                task_result_from_json({{"task", 3}}, "'f'");
              }),
              HasSubstr("'f': not the result of a task"));
}

TEST(TaskModel, NamesOfTablesSayRuleAndLayers) {
  const auto named = [](const std::string& name) {
    ModelConfig model = task_model("mqar");
    set_mixers(model, name);
    return model;
  };
  EXPECT_EQ(named("kda").rule, "kda");
  EXPECT_TRUE(named("kda").layers.empty());
  EXPECT_EQ(named("decay=channel gain=kaczmarz").rule, "decay=channel gain=kaczmarz");
  EXPECT_EQ(named("attention").layers, StringList{"attention"});
  EXPECT_EQ(named("kda+window").rule, "kda");
  EXPECT_EQ(named("kda+window").layers, (StringList{"recurrent", "window"}));
  EXPECT_EQ(named("mamba3+window").layers, (StringList{"mamba3", "window"}));
  EXPECT_EQ(named("mamba3+window").rule, ModelConfig().rule);
  EXPECT_EQ(named("kda+windows").rule, "kda+windows") << "no kind of layer: a rule, which will be refused by its name";
  ModelConfig model = task_model("mqar");
  model.layers = {"conv", "recurrent"};
  set_mixers(model, "deltanet");
  EXPECT_EQ(model.layers, (StringList{"conv", "recurrent"}));
  EXPECT_THROW(set_mixers(model, "deltanet+window"), Error);
}

}  // namespace
}  // namespace fw
