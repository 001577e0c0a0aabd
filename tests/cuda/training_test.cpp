// The training loop on the device: steps that are not finite, checkpoints that go from one device to the other through
// files, and a run that is killed. In the emulation and on a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "ops/profile.h"
#include "train/checkpoint.h"
#include "train/killed_run.h"
#include "train/training_support.h"

namespace fw::testing {
namespace {

std::vector<float> values(Trainer& trainer) {
  std::vector<float> all;
  for (const ParamSpec& spec : trainer.model().params().specs()) {
    const HostView<float> view = trainer.model().params().host_values(spec);
    all.insert(all.end(), view.span().begin(), view.span().end());
  }
  return all;
}

TrainConfig run_on(const std::string& device, const std::string& out, int64_t steps) {
  TrainConfig config = tiny_run(out);
  config.device = device;
  config.steps = steps;
  config.log_every = 1;
  return config;
}

// The first parameter of a model, as what damages it and heals it.
void write_first(Trainer& trainer, float value) {
  Params<float>& params = trainer.model().params();
  const ParamSpec& spec = params.specs().front();
  const HostView<float> view = params.host_values(spec);
  std::vector<float> all(view.span().begin(), view.span().end());
  all.front() = value;
  params.write_values(spec, all);
}

TEST(DeviceTrainer, AStepThatIsNotFiniteIsSkippedAndDamagesNothing) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const TempFolder folder;
    TrainConfig config = run_on("cuda", folder.path("run"), 6);
    config.moments = std::isnan(bad) ? "bf16" : "float32";
    const auto trainer = make_trainer(config, folder.path("data"));
    std::vector<float> good;
    trainer->run(
        [&](const LogRecord& r) {
          if (r.step == 2) {  // step 3 will see it
            good = values(*trainer);
            write_first(*trainer, bad);
          } else if (r.step == 3) {
            EXPECT_FALSE(std::isfinite(r.loss));
            write_first(*trainer, good.front());
            EXPECT_EQ(values(*trainer), good);
          } else if (r.step == 4) {
            EXPECT_TRUE(std::isfinite(r.loss));
            EXPECT_NE(values(*trainer), good);
          }
          EXPECT_EQ(r.skipped, r.step < 3 ? 0 : 1);
        },
        nullptr);
    EXPECT_EQ(trainer->skipped(), 1);
    for (const float value : values(*trainer)) ASSERT_TRUE(std::isfinite(value));
  }
}

// What one device wrote the other goes on from: the parameters to the bit, and the loss goes on falling.
TEST(DeviceTrainer, ACheckpointOfEitherDeviceGoesOnOnTheOther) {
  for (const auto& [first, second] : {std::pair<std::string, std::string>{"cuda", "cpu"}, {"cpu", "cuda"}}) {
    SCOPED_TRACE(fmt::format("{} to {}", first, second));
    const TempFolder folder;
    const std::string out = folder.path("run");
    double before = 0, after = 0;
    const auto began = make_trainer(run_on(first, out, 10), folder.path("data"));
    ASSERT_TRUE(began->run([&](const LogRecord& r) { before = r.loss; }, nullptr));
    const auto went_on = make_trainer(run_on(second, out, 20), folder.path("data"));
    ASSERT_TRUE(went_on->resume(nullptr));
    EXPECT_EQ(went_on->step(), 10);
    EXPECT_EQ(values(*went_on), values(*began));
    ASSERT_TRUE(went_on->run([&](const LogRecord& r) { after = r.loss; }, nullptr));
    EXPECT_LT(after, before);
    EXPECT_EQ(went_on->skipped(), 0);
  }
}

// Stopped half way, read on the other device and written there again, and gone on with: the end of a run that was left
// alone, to the bit.
class DeviceMoments : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Formats, DeviceMoments, ::testing::Values("float32", "bf16"),
                         [](const auto& one) { return one.param; });
TEST_P(DeviceMoments, ThroughTheOtherDevicesFilesAndBackIsNoStep) {
  const TempFolder folder;
  const auto config = [&](const std::string& out, const std::string& moments) {
    TrainConfig run = run_on("cuda", out, 8);
    run.moments = moments;
    return run;
  };
  const auto undisturbed = make_trainer(config(folder.path("whole"), GetParam()), folder.path("data"));
  ASSERT_TRUE(undisturbed->run(nullptr, nullptr));
  const std::string out = folder.path("run"), checkpoints = out + "/checkpoints",
                    path = checkpoint_path(checkpoints, 4);
  std::atomic<bool> stop{false};
  EXPECT_FALSE(make_trainer(config(out, GetParam()), folder.path("data"))
                   ->run([&](const LogRecord& r) { stop = r.step == 4; }, &stop));
  const MomentFormat format = moments_of_checkpoint(path);
  EXPECT_EQ(name_of(format), GetParam());
  {
    LanguageModel<float> model(tiny_model());
    const std::unique_ptr<const Tokenizer> tokenizer = byte_tokenizer();
    model.set_tokenizer(tokenizer->checksum());
    AdamW optimizer({.moments = format}, model.params());
    const TrainerState state = verify_checkpoint(path);
    load_checkpoint(path, state, model, optimizer);
    const std::map<std::string, std::string> before = folder_content(path);
    write_checkpoint(checkpoints, state, model, optimizer, *tokenizer);
    EXPECT_EQ(folder_content(path), before);
  }
  const auto back = make_trainer(config(out, "auto"), folder.path("data"));
  ASSERT_TRUE(back->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
  EXPECT_EQ(back->step(), 4);
  ASSERT_TRUE(back->run(nullptr, nullptr));
  EXPECT_EQ(values(*back), values(*undisturbed));
}

// Gradients made apart: near those that run on, and a run that was stopped goes on to the bit.
TEST(DeviceTrainer, GradientsOfBatchesMadeApart) {
  const TempFolder folder;
  const auto config = [&](const std::string& out, const std::string& sums) {
    TrainConfig run = run_on("cuda", folder.path(out), 8);
    run.accumulate = 2;
    run.sums = sums;
    return run;
  };
  const auto last_loss = [](Trainer& trainer) {
    double loss = 0;
    EXPECT_TRUE(trainer.run([&](const LogRecord& r) { loss = r.loss; }, nullptr));
    return loss;
  };
  const auto running = make_trainer(config("running", "running"), folder.path("data")),
             apart = make_trainer(config("apart", "apart"), folder.path("data"));
  const double want = last_loss(*running);
  EXPECT_NEAR(last_loss(*apart), want, 1e-3 * want);
  std::atomic<bool> stop{false};
  EXPECT_FALSE(make_trainer(config("parted", "apart"), folder.path("data"))
                   ->run([&](const LogRecord& r) { stop = r.step == 4; }, &stop));
  const auto resumed = make_trainer(config("parted", "apart"), folder.path("data"));
  ASSERT_TRUE(resumed->resume(nullptr));
  last_loss(*resumed);
  EXPECT_EQ(values(*resumed), values(*apart));
}

// Every operation of a step by itself: the numbers are those of a step that nobody looks at.
TEST(DeviceTrainer, AProfileChangesNoBit) {
  const TempFolder folder;
  const auto values_of = [&](const std::string& out) {
    const auto trainer = make_trainer(run_on("cuda", folder.path(out), 2), folder.path("data"));
    trainer->run(nullptr, nullptr);
    return values(*trainer);
  };
  const std::vector<float> plain = values_of("plain");
  Profile profile;
  EXPECT_EQ(values_of("profiled"), plain);
  std::map<std::string, OperationTime> rows;
  for (const OperationTime& row : profile.by_time()) rows[row.name] = row;
  for (const char* name : {"linear_forward", "linear_backward", "recurrence_forward", "recurrence_backward",
                           "cross_entropy_backward", "adamw", "square_sum", "bf16_square_sum"}) {
    ASSERT_EQ(rows.count(name), 1U) << name;
    EXPECT_GT(rows[name].seconds, 0) << name;
    EXPECT_GT(rows[name].bytes, 0) << name;
  }
  EXPECT_EQ(rows["adamw"].calls, 2);
  EXPECT_GT(rows["linear_backward"].flops, rows["linear_forward"].flops);
}

// The host's update of a checkpoint that the device wrote is the device's, to the bit, but for what their gradients
// differ in: with none, nothing.
TEST_P(DeviceMoments, AnUpdateOfEitherDeviceIsTheSame) {
  const MomentFormat format = GetParam() == "bf16" ? MomentFormat::kBf16 : MomentFormat::kFloat32;
  const auto run = [&](Device& device) {
    LanguageModel<float> model(tiny_model(), device);
    Random random(2);
    model.init(random);
    AdamW optimizer({.moments = format, .seed = 5}, model.params());
    model.params().zero_grads();
    std::vector<float> grads(model.params().grads().size());
    for (int i = 0; i < 3; ++i) {
      for (float& g : grads) g = static_cast<float>(1e-3 * random.normal());
      device.from_host(model.params().grads().data(), grads.data(), sizeof(float) * grads.size());
      optimizer.update(model.exec(), model.params(), 1e-2, 0.5);
    }
    std::vector<float> all;
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      all.insert(all.end(), view.span().begin(), view.span().end());
      if (format == MomentFormat::kFloat32) {
        const HostView<float> m = optimizer.first().host(spec.offset, spec.size()),
                              v = optimizer.second().host(spec.offset, spec.size());
        all.insert(all.end(), m.span().begin(), m.span().end());
        all.insert(all.end(), v.span().begin(), v.span().end());
      } else {
        const HostView<Bf16> m = optimizer.first_bf16().host(spec.offset, spec.size()),
                             v = optimizer.second_bf16().host(spec.offset, spec.size());
        for (const Bf16 x : m.span()) all.push_back(static_cast<float>(x.bits));
        for (const Bf16 x : v.span()) all.push_back(static_cast<float>(x.bits));
      }
    }
    return all;
  };
  const std::vector<float> got = run(cuda_device()), want = run(host_device());
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << i;
}

// Label long in the emulation (emulated/CMakeLists.txt).
TEST(DeviceKill, ARunKilledAtRandomMomentsEndsAsIfUndisturbed) { expect_kills_leave_no_trace("cuda", 20, "bf16"); }

}  // namespace
}  // namespace fw::testing
