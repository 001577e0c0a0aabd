// Held-out evaluations on the way: the best model is kept, patience ends the run, and an interrupted run does the same
// to the bit.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "base/error.h"
#include "train/best_model.h"
#include "train/checkpoint.h"
#include "train/trainer.h"
#include "training_support.h"

namespace fw {
namespace {

namespace fs = std::filesystem;
using testing::folder_content;
using testing::make_trainer;
using testing::TempFolder;
using testing::tiny_run;

// Evaluates every 2 steps; a rate that is much too high after the first steps makes the loss rise again.
TrainConfig rising_run(const std::string& out) {
  TrainConfig config = tiny_run(out);
  config.schedule = "constant";
  config.lr = 1.0;
  config.min_lr = 0;
  config.warmup = 16;
  // where the loss is lowest, and so when patience ends, depends on the rounding of the machine's vectors
  config.steps = 24;
  config.eval_every = 2;
  config.checkpoint_every = 3;  // now with, now without an evaluation in its step
  return config;
}

std::vector<LogRecord> run(const TrainConfig& config, const std::string& data, bool resume = false,
                           const std::atomic<bool>* stop = nullptr,
                           const std::function<void(const LogRecord&)>& on_log = nullptr) {
  const auto trainer = make_trainer(config, data, true);
  if (resume) {
    EXPECT_TRUE(trainer->resume(nullptr));
  }
  std::vector<LogRecord> log;
  trainer->run(
      [&](const LogRecord& record) {
        log.push_back(record);
        if (on_log) on_log(record);
      },
      stop);
  return log;
}

TEST(Best, TheModelWithTheLowestLossIsKept) {
  const TempFolder folder;
  const TrainConfig config = rising_run(folder.path("run"));
  const std::vector<LogRecord> log = run(config, folder.path("data"));
  const LogRecord* best = nullptr;
  for (const LogRecord& r : log) {
    if (r.eval_loss >= 0 && (best == nullptr || r.eval_loss < best->eval_loss)) best = &r;
  }
  ASSERT_NE(best, nullptr);
  ASSERT_LT(best->step, config.steps) << "the loss has to rise again for this test";
  EXPECT_EQ(read_best(config.out).step, best->step);
  EXPECT_EQ(read_best(config.out).loss, best->eval_loss);
  // It is that model, whole.
  LanguageModel<float> model = load_model<float>(best_path(config.out));
  const auto valid = std::make_shared<const TokenFile>(folder.path("data") + "/valid.tokens");
  EXPECT_EQ(evaluate_file(model, *valid, *load_tokenizer(best_path(config.out)), config.length, false).loss,
            best->eval_loss);
}

TEST(Best, NothingIsKeptWithoutEvaluationsOnTheWay) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.eval_every = 0;
  config.steps = 4;
  run(config, folder.path("data"));
  EXPECT_FALSE(fs::exists(best_path(config.out)));
}

TEST(Best, PatienceEndsTheRun) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.patience = 3;
  const auto trainer = make_trainer(config, folder.path("data"), true);
  std::vector<LogRecord> evaluations;
  EXPECT_TRUE(trainer->run(
      [&](const LogRecord& r) {
        if (r.eval_loss >= 0) evaluations.push_back(r);
      },
      nullptr));
  ASSERT_TRUE(trainer->out_of_patience());
  EXPECT_LT(trainer->step(), config.steps);
  ASSERT_GT(evaluations.size(), 3u);
  EXPECT_EQ(evaluations[evaluations.size() - 4].step, trainer->best().step);
  for (size_t i = evaluations.size() - 3; i < evaluations.size(); ++i)
    EXPECT_GE(evaluations[i].eval_loss, trainer->best().loss);
  EXPECT_TRUE(fs::exists(config.out + "/model/model.safetensors"));
  // Resumed, it has ended; with more patience it goes on.
  EXPECT_TRUE(run(config, folder.path("data"), true).size() <= 1);
  config.patience = 4;
  EXPECT_FALSE(run(config, folder.path("data"), true).empty());
}

// After every step that a run can be stopped in, what is resumed ends with the same models, the same best and the same
// patience.
TEST(Best, ResumeKeepsBestAndPatienceToTheBit) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("whole"));
  config.patience = 3;
  ASSERT_EQ(config.checkpoint_every % 2, 1);
  run(config, folder.path("data"));
  const auto best = folder_content(best_path(config.out)), model = folder_content(config.out + "/model");
  const int64_t steps = list_checkpoints(config.out + "/checkpoints").back();
  ASSERT_LT(steps, config.steps) << "patience has to end the run for this test";
  for (int64_t at = 4; at < steps; ++at) {
    SCOPED_TRACE(at);
    TrainConfig parted = config;
    parted.out = folder.path("parted-" + std::to_string(at));
    parted.log_every = 1;
    std::atomic<bool> stop = false;
    run(parted, folder.path("data"), false, &stop, [&](const LogRecord& r) { stop = stop || r.step == at; });
    run(parted, folder.path("data"), true);
    EXPECT_EQ(folder_content(best_path(parted.out)), best);
    EXPECT_EQ(folder_content(parted.out + "/model"), model);
    fs::remove_all(parted.out);
  }
}

// Killed: everything after some checkpoint is lost but best/, which may be of a step that the resumed run has yet to
// come to.
TEST(Best, ARunThatWasKilledComesToTheSameBest) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.keep = 100;
  run(config, folder.path("data"));
  const auto best = folder_content(best_path(config.out)), model = folder_content(config.out + "/model");
  for (const int64_t step : list_checkpoints(config.out + "/checkpoints")) {
    SCOPED_TRACE(step);
    const std::string copy = folder.path("copy");
    fs::copy(config.out, copy, fs::copy_options::recursive);
    for (const int64_t other : list_checkpoints(copy + "/checkpoints")) {
      if (other > step) fs::remove_all(checkpoint_path(copy + "/checkpoints", other));
    }
    fs::remove_all(copy + "/model");
    TrainConfig again = config;
    again.out = copy;
    run(again, folder.path("data"), true);
    EXPECT_EQ(folder_content(best_path(copy)), best);
    EXPECT_EQ(folder_content(copy + "/model"), model);
    fs::remove_all(copy);
  }
}

TEST(Best, WhatAKilledWriterLeftIsMended) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.steps = 4;
  run(config, folder.path("data"));
  const auto best = folder_content(best_path(config.out));
  // Between the two renames, the next one half written.
  fs::rename(best_path(config.out), config.out + "/.tmp-best-last");
  fs::create_directories(config.out + "/.tmp-best-next");
  recover_best(config.out);
  EXPECT_EQ(folder_content(best_path(config.out)), best);
  EXPECT_FALSE(fs::exists(config.out + "/.tmp-best-last"));
  EXPECT_FALSE(fs::exists(config.out + "/.tmp-best-next"));
  // Between the checkpoint and the model: an older best/ than the checkpoint says.
  const int64_t step = read_best(config.out).step;
  ASSERT_EQ(step, 4) << "the loss has to fall in the first steps for this test";
  testing::write_text(best_path(config.out) + "/best.json", "{\"step\": 2, \"loss\": 9.0}\n");
  fs::remove(best_path(config.out) + "/model.safetensors");
  run(config, folder.path("data"), true);
  EXPECT_EQ(folder_content(best_path(config.out)), best);
}

TEST(Best, OnlyTheFirstTokensAreReadWhereALimitSaysSo) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.steps = 2;
  config.valid_tokens = 40;
  const std::vector<LogRecord> log = run(config, folder.path("data"));
  LanguageModel<float> model = load_model<float>(config.out + "/model");
  const auto valid = std::make_shared<const TokenFile>(folder.path("data") + "/valid.tokens");
  ASSERT_GT(valid->tokens(), 40);
  const EvalResult limited = evaluate_file(model, *valid, *byte_tokenizer(), config.length, false, 40);
  EXPECT_EQ(log.back().eval_loss, limited.loss);
  EXPECT_LT(limited.sum.count, 40);
  EXPECT_GT(limited.sum.count, 20);
  EXPECT_NE(limited.loss, evaluate_file(model, *valid, *byte_tokenizer(), config.length, false).loss);
  // A limit beyond the end is none.
  EXPECT_EQ(evaluate_file(model, *valid, *byte_tokenizer(), config.length, false, 1 << 30).loss,
            evaluate_file(model, *valid, *byte_tokenizer(), config.length, false).loss);
}

TEST(Best, PatienceWithoutEvaluationsIsRefused) {
  const TempFolder folder;
  TrainConfig config = rising_run(folder.path("run"));
  config.patience = 1;
  EXPECT_THROW(make_trainer(config, folder.path("data"), false), Error);
  config.eval_every = 0;
  EXPECT_THROW(make_trainer(config, folder.path("data"), true), Error);
}

}  // namespace
}  // namespace fw
