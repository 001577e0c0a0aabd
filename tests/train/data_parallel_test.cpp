// Steps of several ranks (threads here) have the bits of one rank's, whatever their number, and so have the files of a
// run, also of one that goes on with another number of ranks.
#include "train/data_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/threads.h"
#include "support/thread_ranks.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::folder_content;
using testing::make_trainer;
using testing::records;
using testing::TempFolder;
using testing::ThreadRanks;
using testing::tiny_model;
using testing::tiny_run;

// Large enough that several pieces of a parameter, and parameters after them, go to different ranks.
ModelConfig small_model() {
  ModelConfig config = tiny_model();
  config.vocab_size = 1500;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  return config;
}

// One of one document of `tokens` tokens, every third of which is not scored.
Batch make_batch(int64_t tokens, int64_t vocab, Random& random) {
  Batch batch;
  for (int64_t t = 0; t < tokens; ++t) {
    batch.ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab))));
    batch.targets.push_back(t % 3 == 2 ? -1 : static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab))));
  }
  batch.layout = SeqLayout({0, tokens});
  return batch;
}

struct Trained {
  std::vector<StepResult> steps;
  std::vector<float> values, first, second;
  int64_t updates = 0;
};

std::vector<float> copy(std::span<const float> values) { return {values.begin(), values.end()}; }

// Three steps of five batches of different lengths, one of them without a token.
Trained train(int size, const ModelConfig& config, MomentFormat moments = MomentFormat::kFloat32) {
  Trained trained;
  ThreadRanks::run(size, [&](Communicator& ranks) {
    LanguageModel<float> model(config);
    Random random(3);
    model.init(random);
    AdamWConfig adamw;
    adamw.moments = moments;
    adamw.seed = 7;
    DataParallel<float> parallel(ranks, ranks, adamw, model.params());
    std::vector<StepResult> steps;
    for (int step = 0; step < 3; ++step) {
      std::vector<Batch> batches;
      for (const int64_t tokens : {40, 1, 17, 64, 0}) batches.push_back(make_batch(tokens, config.vocab_size, random));
      steps.push_back(parallel.step(model, batches, 1e-2, 1.0));
    }
    const auto whole = parallel.whole(model.params());
    EXPECT_EQ(whole.has_value(), ranks.rank() == 0);
    if (!whole) return;
    trained = {steps, copy(model.params().values()), copy(whole->first().span()), copy(whole->second().span()),
               whole->updates()};
    if (moments == MomentFormat::kBf16) {
      for (const auto& [buffer, to] :
           {std::pair{&whole->first_bf16(), &trained.first}, {&whole->second_bf16(), &trained.second}}) {
        to->resize(static_cast<size_t>(buffer->size()));
        widen_bf16(buffer->size(), buffer->data(), to->data());
      }
    }
  });
  return trained;
}

void expect_same(const Trained& got, const Trained& want, int ranks) {
  ASSERT_EQ(got.steps.size(), want.steps.size());
  for (size_t i = 0; i < want.steps.size(); ++i) {
    EXPECT_EQ(got.steps[i].nll, want.steps[i].nll) << ranks << " ranks, step " << i;
    EXPECT_EQ(got.steps[i].norm, want.steps[i].norm) << ranks << " ranks, step " << i;
    EXPECT_EQ(got.steps[i].count, want.steps[i].count);
    EXPECT_TRUE(got.steps[i].finite);
  }
  EXPECT_EQ(got.values, want.values) << ranks << " ranks";
  EXPECT_EQ(got.first, want.first) << ranks << " ranks";
  EXPECT_EQ(got.second, want.second) << ranks << " ranks";
  EXPECT_EQ(got.updates, 3);
}

TEST(DataParallel, AnyNumberOfRanksHasTheBitsOfOne) {
  for (const ModelConfig& config : {tiny_model(), small_model()}) {
    const Trained one = train(1, config);
    // some without a batch, or without a parameter
    for (const int ranks : {2, 3, 4, 5, 7}) expect_same(train(ranks, config), one, ranks);
  }
}

// Whose random rounding goes by the index among all parameters.
TEST(DataParallel, SoWithMomentsInBf16) {
  const Trained one = train(1, small_model(), MomentFormat::kBf16);
  EXPECT_FALSE(one.first.empty());
  for (const int ranks : {2, 5}) expect_same(train(ranks, small_model(), MomentFormat::kBf16), one, ranks);
}

// Against the step whose gradients run on from batch to batch: the same but for the order of sums.
TEST(DataParallel, IsTheStepOfOneRankButForTheOrderOfSums) {
  const ModelConfig config = small_model();
  LanguageModel<double> apart(config), running(config);
  Random random(3), same(3);
  apart.init(random);
  running.init(same);
  DataParallel<double> parallel(one_rank(), one_rank(), {}, apart.params());
  BasicAdamW<double> adamw({}, running.params());
  for (int step = 0; step < 3; ++step) {
    std::vector<Batch> batches;
    for (const int64_t tokens : {40, 1, 17}) batches.push_back(make_batch(tokens, config.vocab_size, random));
    const StepResult got = parallel.step(apart, batches, 1e-2, 1.0),
                     want = train_step(running, adamw, batches, 1e-2, 1.0);
    EXPECT_NEAR(got.nll, want.nll, 1e-9 * want.nll);
    EXPECT_NEAR(got.norm, want.norm, 1e-9 * want.norm);
    EXPECT_EQ(got.count, want.count);
  }
  const auto a = apart.params().values(), b = running.params().values();
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-7) << i;
}

TEST(DataParallel, AStepThatIsNotFiniteChangesNothingOnAnyRank) {
  for (const int size : {1, 3}) {
    ThreadRanks::run(size, [&](Communicator& ranks) {
      LanguageModel<float> model(tiny_model());
      Random random(3);
      model.init(random);
      // The loss of the rows with this token is not finite: one rank of three sees it.
      const ParamSpec& spec = model.params().specs().front();
      std::vector<float> values = copy(model.params().host_values(spec).span());
      values[0] = std::numeric_limits<float>::infinity();
      model.params().write_values(spec, values);
      DataParallel<float> parallel(ranks, ranks, {}, model.params());
      std::vector<Batch> batches;
      for (int i = 0; i < 3; ++i) {
        batches.push_back(make_batch(8, 200, random));
        for (int32_t& id : batches.back().ids) id = 5 + id % 100;
      }
      batches[1].ids[3] = 0;
      const std::vector<float> before = copy(model.params().values());
      const StepResult result = parallel.step(model, batches, 1e-2, 1.0);
      EXPECT_FALSE(result.finite);
      EXPECT_EQ(copy(model.params().values()), before);
      EXPECT_EQ(parallel.optimizer().updates(), 0);
      for (const float moment : parallel.optimizer().first().span()) ASSERT_EQ(moment, 0.0f);
    });
  }
}

TEST(DataParallel, MoreRanksThanThereAreParts) {
  struct Many : Communicator {
    int rank() const override { return 0; }
    int size() const override { return 129; }
    void all_to_all(std::span<const ConstPart>, std::span<const Part>) override {}
    void all_gather(std::span<const Part>) override {}
    void broadcast(Part, int) override {}
    void barrier() override {}
  } many;
  LanguageModel<float> model(tiny_model());
  try {
    const DataParallel<float> parallel(many, many, {}, model.params());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "ranks: expected at most 128, got 129");
  }
}

// ---- runs

TrainConfig parallel_run(const std::string& out) {
  TrainConfig config = tiny_run(out);
  config.accumulate = 3;
  config.sums = "apart";
  config.eval_every = 6;
  return config;
}

// One run on `size` ranks, from its newest checkpoint if there is one; stopped after `steps` of this run.
void run_on(int size, const TempFolder& folder, const TrainConfig& config, int64_t steps = 1000) {
  std::atomic<bool> stop = false;
  ThreadRanks::run(size, [&](Communicator& ranks) {
    const auto trainer = make_trainer(config, folder.path("data"), true, tiny_model(), ranks);
    trainer->resume(nullptr);
    const int64_t last = trainer->step() + steps;
    std::vector<int64_t> logged;
    const bool done = trainer->run([&](const LogRecord& r) { logged.push_back(r.step); }, &stop,
                                   [&](const StepProgress& p) { stop = p.step >= last; });
    EXPECT_EQ(done, steps == 1000);
    EXPECT_EQ(logged.empty(), ranks.rank() > 0);
  });
}

void expect_same_run(const TempFolder& folder, const std::string& got, const std::string& want) {
  for (const char* part : {"/checkpoints/step-15", "/model", "/best"}) {
    EXPECT_EQ(folder_content(folder.path(got) + part), folder_content(folder.path(want) + part)) << got << part;
  }
  EXPECT_EQ(records(folder.path(got) + "/metrics.jsonl"), records(folder.path(want) + "/metrics.jsonl")) << got;
}

TEST(DataParallel, ARunOfAnyNumberOfRanksLeavesTheSameFiles) {
  const TempFolder folder;
  run_on(1, folder, parallel_run(folder.path("one")));
  for (const int ranks : {2, 3}) {
    const std::string name = "of-" + std::to_string(ranks);
    run_on(ranks, folder, parallel_run(folder.path(name)));
    expect_same_run(folder, name, "one");
  }
}

TEST(DataParallel, ARunGoesOnWithAnotherNumberOfRanks) {
  const TempFolder folder;
  run_on(1, folder, parallel_run(folder.path("one")));
  for (const int ranks : {3, 1, 2}) {
    const int64_t steps = ranks == 2 ? 1000 : 4;
    run_on(ranks, folder, parallel_run(folder.path("several")), steps);
  }
  expect_same_run(folder, "several", "one");
}

TEST(DataParallel, WhatARunOnSeveralRanksWants) {
  const TempFolder folder;
  const auto message = [&](const TrainConfig& config) -> std::string {
    try {
      run_on(2, folder, config);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "no error";
  };
  TrainConfig config = parallel_run(folder.path("run"));
  config.sums = "running";
  EXPECT_EQ(message(config), "sums: expected apart or local on 2 ranks, got running");
  config.sums = "apart";
  config.accumulate = 1;
  EXPECT_EQ(message(config), "accumulate: expected at least 2, a batch of every step for each rank, got 1");
}

}  // namespace
}  // namespace fw
