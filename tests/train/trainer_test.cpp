#include "train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/safetensors.h"
#include "base/stop.h"
#include "base/threads.h"
#include "train/checkpoint.h"
#include "train/schedule.h"
#include "training_support.h"

namespace fw {
namespace {

using testing::folder_content;
using testing::make_trainer;
using testing::read_text;
using testing::records;
using testing::TempFolder;
using testing::tiny_model;
using testing::tiny_run;

std::vector<float> values(Trainer& trainer) {
  return {trainer.model().params().values().begin(), trainer.model().params().values().end()};
}

std::string message_of(const std::function<void()>& action, ErrorKind kind) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(Trainer, LearnsAndLeavesWhatItPromises) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.steps = 120;
  config.eval_every = 50;
  const auto trainer = make_trainer(config, folder.path("data"), true);
  std::vector<LogRecord> log;
  EXPECT_TRUE(trainer->run([&](const LogRecord& r) { log.push_back(r); }, nullptr));
  EXPECT_EQ(trainer->step(), 120);
  EXPECT_EQ(trainer->skipped(), 0);

  ASSERT_EQ(log.size(), 31u);  // every 4, and step 50
  EXPECT_NEAR(log.front().loss, std::log(256.0), 0.7);
  EXPECT_LT(log.back().loss, 2.6);
  EXPECT_EQ(log.back().tokens, 120 * 4 * 32);
  for (const LogRecord& r : log) {
    EXPECT_EQ(r.eval_loss >= 0, r.step == 50 || r.step == 100 || r.step == 120) << r.step;
    EXPECT_EQ(r.lr, learning_rate({config.lr, config.min_lr, config.warmup, config.steps}, r.step - 1));
    EXPECT_GT(r.ms, 0);
  }
  EXPECT_LT(log.back().eval_loss, 2.8);
  EXPECT_NEAR(log.back().eval_bits_per_byte, log.back().eval_loss / std::log(2.0), 1e-12);
  EXPECT_EQ(records(folder.path("run/metrics.jsonl")).size(), 31u);

  const LanguageModel<float> model = load_model<float>(folder.path("run/model"));
  EXPECT_EQ(std::vector<float>(model.params().values().begin(), model.params().values().end()), values(*trainer));
  EXPECT_EQ(load_tokenizer(folder.path("run/model"))->type(), "bytes");
}

// Records say how tokens spread over the experts; the bias of the choice stays as it was.
TEST(Trainer, SaysTheLoadOfExperts) {
  const TempFolder folder;
  ModelConfig model = tiny_model();
  model.mlp = "experts";
  model.experts.num_experts = 6;
  model.experts.correction_bias = true;
  model.experts.balance = 0.01;
  const auto trainer = make_trainer(tiny_run(folder.path("run")), folder.path("data"), false, model);
  std::vector<LogRecord> log;
  EXPECT_TRUE(trainer->run([&](const LogRecord& r) { log.push_back(r); }, nullptr));
  EXPECT_LT(log.back().loss, log.front().loss);
  for (const LogRecord& r : log) {
    EXPECT_GE(r.expert_peak, 1) << r.step;
    EXPECT_LE(r.expert_peak, 3) << r.step;  // a token has each of its two experts once
    EXPECT_LE(r.experts_idle, 4 * model.num_hidden_layers) << r.step;
  }
  for (const ParamSpec& spec : trainer->model().params().specs()) {
    if (!spec.buffer) continue;
    for (const float x : trainer->model().params().host_values(spec).span()) EXPECT_EQ(x, 0) << spec.name;
  }
}

TEST(Trainer, ResultsDoNotDependOnTheNumberOfThreads) {
  const TempFolder folder;
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    const auto trainer = make_trainer(tiny_run(folder.path("run" + std::to_string(threads))), folder.path("data"));
    trainer->run(nullptr, nullptr);
    results.push_back(values(*trainer));
  }
  set_num_threads(0);
  EXPECT_EQ(results[0], results[1]);
}

TEST(Trainer, AccumulatedMicroBatchesAreOneLargeBatch) {
  const TempFolder folder;
  const auto run = [&](int64_t batch, int64_t accumulate) {
    TrainConfig config = tiny_run(folder.path("run" + std::to_string(batch)));
    config.batch = batch;
    config.accumulate = accumulate;
    config.steps = 3;
    // With a large eps the update is proportional to the gradient: no sign of a rounding error is amplified.
    config.adam_eps = 1.0;
    config.lr = config.min_lr = 1.0;
    config.clip = 0;
    const auto trainer = make_trainer(config, folder.path("data"));
    const std::vector<float> before = values(*trainer);
    trainer->run(nullptr, nullptr);
    std::vector<float> change = values(*trainer);
    for (size_t i = 0; i < change.size(); ++i) change[i] -= before[i];
    return change;
  };
  const std::vector<float> whole = run(8, 1), split = run(1, 8);
  double difference = 0, size = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    difference += std::pow(static_cast<double>(whole[i]) - split[i], 2);
    size += std::pow(static_cast<double>(whole[i]), 2);
  }
  EXPECT_GT(std::sqrt(size), 1e-2);
  EXPECT_LT(std::sqrt(difference / size), 1e-5);
}

TEST(Trainer, ClipsTheGlobalNormAndReportsTheUnclippedOne) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.steps = 1;
  config.log_every = 1;
  config.clip = 1e-2;
  const auto trainer = make_trainer(config, folder.path("data"));
  double norm = 0;
  trainer->run([&](const LogRecord& r) { norm = r.norm; }, nullptr);
  ASSERT_GT(norm, 0.1);
  // After one step the first moment is (1 - beta1) times the clipped gradient.
  const SafetensorsReader moments(folder.path("run/checkpoints/step-1/optimizer.safetensors"));
  double sum = 0;
  for (const ParamSpec& spec : trainer->model().params().specs()) {
    std::vector<float> m(static_cast<size_t>(spec.size()));
    moments.read<float>("m." + spec.name, spec.shape, m);
    for (const float x : m) sum += static_cast<double>(x) * x;
  }
  EXPECT_NEAR(std::sqrt(sum), 0.1 * config.clip, 1e-3 * 0.1 * config.clip);
}

TEST(Trainer, AStepThatIsNotFiniteIsSkippedAndDamagesNothing) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.log_every = 1;
  const auto trainer = make_trainer(config, folder.path("data"));
  std::vector<float> good;
  int64_t reported = 0;
  trainer->run(
      [&](const LogRecord& r) {
        std::span<float> parameters = trainer->model().params().values();
        if (r.step == 6) {  // step 7 will see a NaN
          good = values(*trainer);
          parameters[0] = std::numeric_limits<float>::quiet_NaN();
        } else if (r.step == 7) {
          EXPECT_FALSE(std::isfinite(r.loss));
          EXPECT_FALSE(std::isfinite(r.norm));
          parameters[0] = good[0];
          EXPECT_EQ(values(*trainer), good);
        } else if (r.step == 8) {
          EXPECT_TRUE(std::isfinite(r.loss));
          EXPECT_NE(values(*trainer), good);
        }
        reported = r.skipped;
        EXPECT_EQ(r.lr, learning_rate({config.lr, config.min_lr, config.warmup, config.steps}, r.step - 1));
      },
      nullptr);
  EXPECT_EQ(trainer->step(), 15);
  EXPECT_EQ(trainer->skipped(), 1);
  EXPECT_EQ(reported, 1);
  for (const float value : values(*trainer)) ASSERT_TRUE(std::isfinite(value));
  const nlohmann::json state =
      nlohmann::json::parse(read_text(folder.path("run/checkpoints/step-15/trainer.json"))).at("state");
  EXPECT_EQ(state.at("updates"), 14);
  EXPECT_EQ(state.at("step"), 15);
  EXPECT_EQ(state.at("skipped"), 1);
  EXPECT_EQ(state.at("skipped_in_row"), 0);
}

// Moments in bf16: a run that is stopped ends as one that is not, to the bit, whatever is said of them; it learns, and
// does not have the bits of float32 ones.
TEST(Trainer, MomentsInBf16GoOnToTheBit) {
  const TempFolder folder;
  const auto config = [&](const std::string& out, const std::string& moments) {
    TrainConfig run = tiny_run(folder.path(out));
    run.moments = moments;
    run.log_every = 1;
    return run;
  };
  double first = 0, last = 0;
  const auto whole = make_trainer(config("whole", "bf16"), folder.path("data")),
             wide = make_trainer(config("wide", "float32"), folder.path("data"));
  EXPECT_TRUE(whole->run([&](const LogRecord& r) { (r.step == 1 ? first : last) = r.loss; }, nullptr));
  EXPECT_LT(last, first);
  EXPECT_TRUE(wide->run(nullptr, nullptr));
  EXPECT_NE(values(*whole), values(*wide));
  std::atomic<bool> stop{false};
  EXPECT_FALSE(make_trainer(config("run", "bf16"), folder.path("data"))
                   ->run([&](const LogRecord& r) { stop = r.step == 7; }, &stop));
  EXPECT_EQ(moments_of_checkpoint(checkpoint_path(folder.path("run/checkpoints"), 7)), MomentFormat::kBf16);
  const auto back = make_trainer(config("run", "auto"), folder.path("data"));
  EXPECT_EQ(back->moments(), MomentFormat::kFloat32);
  ASSERT_TRUE(back->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
  EXPECT_EQ(back->moments(), MomentFormat::kBf16);
  EXPECT_TRUE(back->run(nullptr, nullptr));
  EXPECT_EQ(values(*back), values(*whole));
  EXPECT_EQ(folder_content(folder.path("run/checkpoints/step-15")),
            folder_content(folder.path("whole/checkpoints/step-15")));
}

// Who says another format than the checkpoint's gets it, and is told.
TEST(Trainer, MomentsOfAnotherFormatAreConvertedAndThatIsSaid) {
  for (const auto& [theirs, ours] : {std::pair<std::string, std::string>{"bf16", "float32"}, {"float32", "bf16"}}) {
    SCOPED_TRACE(theirs);
    const TempFolder folder;
    TrainConfig config = tiny_run(folder.path("run"));
    config.moments = theirs;
    EXPECT_TRUE(make_trainer(config, folder.path("data"))->run(nullptr, nullptr));
    config.moments = ours;
    config.steps = 20;
    const auto trainer = make_trainer(config, folder.path("data"));
    std::vector<std::string> warnings;
    ASSERT_TRUE(trainer->resume([&](const std::string& warning) { warnings.push_back(warning); }));
    ASSERT_EQ(warnings.size(), 1U);
    EXPECT_NE(warnings[0].find("are " + theirs), std::string::npos) << warnings[0];
    EXPECT_NE(warnings[0].find("moments = " + ours), std::string::npos) << warnings[0];
    EXPECT_TRUE(trainer->run(nullptr, nullptr));
    EXPECT_EQ(name_of(moments_of_checkpoint(folder.path("run/checkpoints/step-20"))), ours);
  }
  TrainConfig config;
  config.moments = "fp8";
  EXPECT_NE(message_of([&] { validate(config); }, ErrorKind::kUsage).find("moments"), std::string::npos);
}

TEST(Trainer, TenSkippedStepsInARowEndTheRun) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.steps = 40;
  config.precision = "bf16";
  const auto trainer = make_trainer(config, folder.path("data"));
  const std::vector<float> before = values(*trainer);
  trainer->model().params().values()[0] = std::numeric_limits<float>::infinity();
  const std::string message = message_of([&] { trainer->run(nullptr, nullptr); }, ErrorKind::kNumeric);
  EXPECT_NE(message.find("10 times in a row"), std::string::npos) << message;
  EXPECT_NE(message.find("lower lr"), std::string::npos) << message;
  EXPECT_NE(message.find("precision = f32"), std::string::npos) << message;
  EXPECT_EQ(trainer->step(), 10);
  EXPECT_EQ(trainer->skipped(), 10);
  trainer->model().params().values()[0] = before[0];
  EXPECT_EQ(values(*trainer), before);
}

TEST(Trainer, NineSkippedStepsInARowDoNotEndTheRun) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.log_every = 1;
  config.steps = 22;
  const auto trainer = make_trainer(config, folder.path("data"));
  float& parameter = trainer->model().params().values()[0];
  const float good = parameter;
  parameter = std::numeric_limits<float>::quiet_NaN();
  const auto heal = [&](const LogRecord& r) {
    const bool bad = r.step != 9 && r.step < 19;  // steps 1..9 are bad, 10 is good, 11..19 are bad
    parameter = bad ? std::numeric_limits<float>::quiet_NaN() : good;
  };
  EXPECT_TRUE(trainer->run(heal, nullptr));
  EXPECT_EQ(trainer->skipped(), 18);
}

TEST(Trainer, StopsAtRequestWithACheckpointAndResumesBitForBit) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("whole"));
  config.log_every = 1;  // to be called at every step
  const auto whole = make_trainer(config, folder.path("data"), true);
  ASSERT_TRUE(whole->run(nullptr, nullptr));
  for (const int64_t at : {1, 2, 5, 9, 14}) {
    config.out = folder.path("stopped" + std::to_string(at));
    std::atomic<bool> stop{false};
    const auto trainer = make_trainer(config, folder.path("data"), true);
    EXPECT_FALSE(trainer->run([&](const LogRecord& r) { stop = r.step == at; }, &stop));
    EXPECT_EQ(trainer->step(), at);
    const auto resumed = make_trainer(config, folder.path("data"), true);
    ASSERT_TRUE(resumed->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
    EXPECT_EQ(resumed->step(), at);
    ASSERT_TRUE(resumed->run(nullptr, nullptr));
    EXPECT_EQ(values(*resumed), values(*whole)) << at;
    auto left = folder_content(config.out + "/checkpoints/step-15"),
         right = folder_content(folder.path("whole/checkpoints/step-15"));
    EXPECT_EQ(left, right) << at;
    EXPECT_EQ(folder_content(config.out + "/model"), folder_content(folder.path("whole/model")));
  }
}

// From a checkpoint in the middle of a log interval, over a metrics file that already has later records.
TEST(Trainer, ResumedCurvesAreThoseOfAnUndisturbedRun) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.keep = 9;
  config.eval_every = 6;
  ASSERT_TRUE(make_trainer(config, folder.path("data"), true)->run(nullptr, nullptr));
  const auto expected = records(folder.path("run/metrics.jsonl"));
  ASSERT_EQ(expected.size(), 5u);  // after steps 4, 6, 8, 12, 15
  const auto content = folder_content(folder.path("run/checkpoints/step-15"));
  for (const int64_t step : list_checkpoints(folder.path("run/checkpoints"))) {
    if (step > 5) std::filesystem::remove_all(checkpoint_path(folder.path("run/checkpoints"), step));
  }
  const auto resumed = make_trainer(config, folder.path("data"), true);
  ASSERT_TRUE(resumed->resume(nullptr));
  EXPECT_EQ(resumed->step(), 5);
  ASSERT_TRUE(resumed->run(nullptr, nullptr));
  EXPECT_EQ(records(folder.path("run/metrics.jsonl")), expected);
  EXPECT_EQ(folder_content(folder.path("run/checkpoints/step-15")), content);
}

// Asks all to stop as a signal does, and takes it back at the end of the test.
struct StopAll {
  ~StopAll() { withdraw_stop(); }
};

TEST(Trainer, AnInterruptedEvaluationIsMadeByTheRunThatIsResumed) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("whole"));
  config.eval_every = 6;
  const auto whole = make_trainer(config, folder.path("data"), true);
  ASSERT_TRUE(whole->run(nullptr, nullptr));
  for (const int64_t at : {6, 15}) {  // between checkpoints, and the last step
    const StopAll after;
    config.out = folder.path("stopped" + std::to_string(at));
    const auto trainer = make_trainer(config, folder.path("data"), true);
    // Seen by nobody before the next evaluation.
    const bool done = trainer->run(
        [&](const LogRecord& r) {
          if (r.step == (at == 6 ? 4 : 12)) request_stop();
        },
        nullptr);
    EXPECT_EQ(done, at == 15);
    EXPECT_EQ(trainer->step(), at);
    EXPECT_TRUE(std::filesystem::exists(config.out + "/checkpoints/step-" + std::to_string(at)));
    EXPECT_EQ(std::filesystem::exists(config.out + "/model/model.safetensors"), at == 15);
    withdraw_stop();
    const auto resumed = make_trainer(config, folder.path("data"), true);
    ASSERT_TRUE(resumed->resume(nullptr));
    EXPECT_EQ(resumed->step(), at);
    ASSERT_TRUE(resumed->run(nullptr, nullptr));
    EXPECT_EQ(records(config.out + "/metrics.jsonl"), records(folder.path("whole/metrics.jsonl"))) << at;
    EXPECT_EQ(folder_content(config.out + "/checkpoints/step-15"),
              folder_content(folder.path("whole/checkpoints/step-15")))
        << at;
    EXPECT_EQ(folder_content(config.out + "/model"), folder_content(folder.path("whole/model")));
  }
}

TEST(Trainer, ARecordThatReachedOnlyOneFileIsMadeAgain) {
  const TempFolder folder;
  const TrainConfig config = tiny_run(folder.path("run"));
  ASSERT_TRUE(make_trainer(config, folder.path("data"), true)->run(nullptr, nullptr));
  const auto expected = records(folder.path("run/metrics.jsonl"));
  const std::string json = read_text(folder.path("run/metrics.jsonl"));
  testing::write_text(folder.path("run/metrics.jsonl"), json.substr(0, json.rfind('{')));
  const auto resumed = make_trainer(config, folder.path("data"), true);
  ASSERT_TRUE(resumed->resume(nullptr));
  ASSERT_TRUE(resumed->run(nullptr, nullptr));
  EXPECT_EQ(records(folder.path("run/metrics.jsonl")), expected);
  const std::string csv = read_text(folder.path("run/metrics.csv"));
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 1 + static_cast<int64_t>(expected.size())) << csv;
}

TEST(Trainer, WhatTheReaderOfRecordsThrowsComesAfterACheckpoint) {
  const TempFolder folder;
  const TrainConfig config = tiny_run(folder.path("run"));
  const auto trainer = make_trainer(config, folder.path("data"));
  const auto gone = [](const LogRecord& r) {
    if (r.step == 8) fail_io("the reader is gone");
  };
  const std::string message = message_of([&] { trainer->run(gone, nullptr); }, ErrorKind::kIo);
  EXPECT_NE(message.find("the reader is gone; stopped at step 8 of 15, the checkpoint is written"), std::string::npos)
      << message;
  EXPECT_TRUE(std::filesystem::exists(folder.path("run/checkpoints/step-8")));
}

TEST(Trainer, AModelThatIsNotFiniteIsNotWritten) {
  const TempFolder folder;
  for (const bool with_valid : {false, true}) {
    TrainConfig config = tiny_run(folder.path(with_valid ? "valid" : "run"));
    config.steps = 3;
    config.warmup = 0;
    config.lr = 1e9;
    config.clip = 0;
    const std::string message = message_of(
        [&] { make_trainer(config, folder.path("data"), with_valid)->run(nullptr, nullptr); }, ErrorKind::kNumeric);
    EXPECT_NE(message.find("not finite"), std::string::npos) << message;
    EXPECT_FALSE(std::filesystem::exists(config.out + "/model"));
  }
}

TEST(Trainer, NoCheckpointIsWrittenOfParametersThatAreNotFinite) {
  const TempFolder folder;
  TrainConfig config = tiny_run(folder.path("run"));
  config.log_every = 1;
  const auto trainer = make_trainer(config, folder.path("data"));
  const auto damage = [&](const LogRecord& r) {
    if (r.step == 9) trainer->model().params().values()[0] = std::numeric_limits<float>::quiet_NaN();
  };
  message_of([&] { trainer->run(damage, nullptr); }, ErrorKind::kNumeric);
  EXPECT_TRUE(std::filesystem::exists(folder.path("run/checkpoints/step-5")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("run/checkpoints/step-10")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("run/model")));
}

TEST(Trainer, AFinishedRunResumedHasNothingToDo) {
  const TempFolder folder;
  const TrainConfig config = tiny_run(folder.path("run"));
  ASSERT_TRUE(make_trainer(config, folder.path("data"))->run(nullptr, nullptr));
  const auto metrics = read_text(folder.path("run/metrics.csv"));
  std::filesystem::remove_all(folder.path("run/model"));  // as if killed before it was written
  const auto again = make_trainer(config, folder.path("data"));
  ASSERT_TRUE(again->resume(nullptr));
  EXPECT_TRUE(again->run([](const LogRecord&) { ADD_FAILURE() << "a record without a step"; }, nullptr));
  EXPECT_EQ(read_text(folder.path("run/metrics.csv")), metrics);
  EXPECT_TRUE(std::filesystem::exists(folder.path("run/model/model.safetensors")));
}

TEST(Trainer, ARunDoesNotOverwriteAnEarlierOne) {
  const TempFolder folder;
  const TrainConfig config = tiny_run(folder.path("run"));
  ASSERT_TRUE(make_trainer(config, folder.path("data"))->run(nullptr, nullptr));
  const auto metrics = read_text(folder.path("run/metrics.csv"));
  const auto again = make_trainer(config, folder.path("data"));
  const std::string message = message_of([&] { again->run(nullptr, nullptr); }, ErrorKind::kUsage);
  EXPECT_NE(message.find("--resume"), std::string::npos) << message;
  EXPECT_EQ(read_text(folder.path("run/metrics.csv")), metrics);
  EXPECT_TRUE(std::filesystem::exists(folder.path("run/checkpoints/step-15/model.safetensors")));
}

TEST(Trainer, TakesTheRatesOfItsSchedule) {
  const TempFolder folder;
  for (const auto& one : std::vector<std::pair<std::string, ScheduleShape>>{
           {"linear", ScheduleShape::kLinear}, {"constant", ScheduleShape::kConstant}, {"wsd", ScheduleShape::kWsd}}) {
    const std::string name = one.first;
    const ScheduleShape shape = one.second;
    TrainConfig config = tiny_run(folder.path(name));
    config.schedule = name;
    config.decay_share = 0.4;
    config.warmup_from = 1e-4;
    config.log_every = 1;
    int64_t records = 0;
    make_trainer(config, folder.path("data"))
        ->run(
            [&](const LogRecord& r) {
              ++records;
              EXPECT_EQ(r.lr, learning_rate({config.lr, config.min_lr, config.warmup, config.steps, shape, 0.4, 1e-4},
                                            r.step - 1))
                  << name << " " << r.step;
            },
            nullptr);
    EXPECT_EQ(records, config.steps);
  }
}

TEST(Trainer, RefusesConfigurationsThatCannotBe) {
  const auto refuses = [](const char* key, const std::function<void(TrainConfig&)>& change) {
    TrainConfig config;
    change(config);
    const std::string message = message_of([&] { validate(config); }, ErrorKind::kUsage);
    EXPECT_NE(message.find(key), std::string::npos) << message;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  refuses("out", [](TrainConfig& c) { c.out.clear(); });
  refuses("steps", [](TrainConfig& c) { c.steps = -1; });
  refuses("batch", [](TrainConfig& c) { c.batch = 0; });
  refuses("length", [](TrainConfig& c) { c.length = -5; });
  refuses("batch, length", [](TrainConfig& c) { c.batch = c.length = int64_t{1} << 40; });
  refuses("accumulate", [](TrainConfig& c) { c.accumulate = 0; });
  // all batches of a step lie in memory
  refuses("accumulate", [](TrainConfig& c) { c.accumulate = int64_t{1} << 40; });
  refuses("lr", [](TrainConfig& c) { c.lr = 0; });
  refuses("lr", [nan](TrainConfig& c) { c.lr = nan; });
  refuses("min_lr", [](TrainConfig& c) { c.min_lr = 1; });
  refuses("warmup", [](TrainConfig& c) { c.warmup = -1; });
  refuses("warmup_from: expected a number >= 0 and <= lr, got 0.1", [](TrainConfig& c) { c.warmup_from = 0.1; });
  refuses("warmup_from", [](TrainConfig& c) { c.warmup_from = -1e-4; });
  refuses("schedule: expected cosine, linear, constant or wsd, got 'cosinus'; did you mean 'cosine'?",
          [](TrainConfig& c) { c.schedule = "cosinus"; });
  refuses("decay_share", [](TrainConfig& c) { c.decay_share = 0; });
  refuses("decay_share", [nan](TrainConfig& c) { c.decay_share = nan; });
  refuses("beta1", [](TrainConfig& c) { c.beta1 = 1; });
  refuses("beta2", [](TrainConfig& c) { c.beta2 = -0.1; });
  refuses("adam_eps", [](TrainConfig& c) { c.adam_eps = 0; });
  refuses("weight_decay", [](TrainConfig& c) { c.weight_decay = -1; });
  refuses("clip", [nan](TrainConfig& c) { c.clip = nan; });
  refuses("device: expected cpu, cuda or cuda:N", [](TrainConfig& c) { c.device = "gpu"; });
  refuses("precision", [](TrainConfig& c) { c.precision = "fp8"; });
  refuses("log_every", [](TrainConfig& c) { c.log_every = 0; });
  refuses("eval_every", [](TrainConfig& c) { c.eval_every = -1; });
  refuses("checkpoint_every", [](TrainConfig& c) { c.checkpoint_every = -1; });
  refuses("keep", [](TrainConfig& c) { c.keep = 0; });
  EXPECT_NO_THROW(validate(TrainConfig()));
}

TEST(Trainer, RefusesFilesOfAnotherVocabulary) {
  const TempFolder folder;
  ModelConfig small = tiny_model();
  small.vocab_size = 100;
  const std::string message = message_of(
      [&] { make_trainer(tiny_run(folder.path("run")), folder.path("data"), false, small); }, ErrorKind::kUsage);
  EXPECT_NE(message.find("256"), std::string::npos) << message;
  EXPECT_NE(message.find("100"), std::string::npos) << message;
}

}  // namespace
}  // namespace fw
