// Runs that train LoRA adapters: the model stays as it is, to the bit; memory, ways of summing, resuming.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <utility>

#include "support/error_of.h"
#include "train/checkpoint.h"
#include "train/memory_plan.h"
#include "training_support.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

LanguageModel<float> base_model(uint64_t seed = 3) {
  LanguageModel<float> model(tiny_model());
  Random random(seed);
  model.init(random);
  return model;
}

TrainConfig lora_run(const std::string& out) {
  TrainConfig config = tiny_run(out);
  config.lora = 3;
  config.from = "base";
  return config;
}

std::unique_ptr<Trainer> trainer_of(const TrainConfig& config, const TempFolder& folder,
                                    const LanguageModel<float>& base) {
  std::unique_ptr<Trainer> trainer = make_trainer(config, folder.path() + "/data", true);
  trainer->start_from(base);
  return trainer;
}

std::vector<float> values_of(const Params<float>& params) { return {params.values().begin(), params.values().end()}; }

// Of the text that is trained on.
double loss_of(LanguageModel<float>& model) {
  const std::string text = sample_text(60, 11).substr(0, 2000);
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  std::vector<int32_t> targets(ids.begin() + 1, ids.end());
  targets.push_back(-1);
  return model.evaluate(ids, targets, SeqLayout({0, static_cast<int64_t>(ids.size())})).nll;
}

TEST(LoraRun, TrainsTheAdaptersAndNoBitOfTheModel) {
  const TempFolder folder;
  const LanguageModel<float> base = base_model();
  const std::unique_ptr<Trainer> trainer = trainer_of(lora_run(folder.path() + "/run"), folder, base);
  const std::vector<float> before = values_of(trainer->model().trained());
  const double loss_before = loss_of(trainer->model());
  ASSERT_TRUE(trainer->run(nullptr, nullptr));
  EXPECT_EQ(values_of(std::as_const(trainer->model()).params()), values_of(base.params()));
  EXPECT_NE(values_of(trainer->model().trained()), before);
  EXPECT_LT(loss_of(trainer->model()), loss_before);
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/run/model/model.safetensors"));
}

TEST(LoraRun, ResumesToTheBitAndOnlyWithTheSameBaseAndRank) {
  const TempFolder folder;
  const LanguageModel<float> base = base_model();
  TrainConfig config = lora_run(folder.path() + "/whole");
  trainer_of(config, folder, base)->run(nullptr, nullptr);
  config.out = folder.path() + "/parted";
  {
    std::atomic<bool> stop{false};
    trainer_of(config, folder, base)->run(nullptr, &stop, [&](const StepProgress& p) { stop = p.step == 7; });
  }
  const std::unique_ptr<Trainer> resumed = trainer_of(config, folder, base);
  ASSERT_TRUE(resumed->resume(nullptr));
  EXPECT_EQ(resumed->step(), 7);
  const auto error = [&](const TrainConfig& other, const LanguageModel<float>& model) {
    return error_of([&] { trainer_of(other, folder, model)->resume(nullptr); });
  };
  EXPECT_THAT(error(config, base_model(4)), HasSubstr("a base model with the checksum"));
  TrainConfig wider = config;
  wider.lora = 4;
  EXPECT_THAT(error(wider, base), HasSubstr("LoRA of rank 3, alpha 32, all, this run has rank 4"));
  ASSERT_TRUE(resumed->run(nullptr, nullptr));
  const auto adapters = [&](const std::string& run) {
    return read_text(folder.path() + run + "/model/adapter_model.safetensors");
  };
  EXPECT_EQ(adapters("/parted"), adapters("/whole"));
}

// The files have rows in the order of that program's tensors, the model in its own.
TEST(LoraRun, CheckpointsOfAdaptersWithAnotherProgramsNames) {
  const TempFolder folder;
  const auto adapted = [] {
    LanguageModel<float> model = load_model<float>(FW_SOURCE_DIR "/tests/conformance/models/qwen3_next");
    model.add_adapters({{2, 4.0, false, {}}, "base", true});
    return model;
  };
  LanguageModel<float> model = adapted(), loaded = adapted();
  Random random(5);
  for (const ParamSpec& spec : model.trained().specs()) {
    std::vector<float> values(static_cast<size_t>(spec.size()));
    for (float& x : values) x = static_cast<float>(random.normal());
    model.trained().write_values(spec, values);
  }
  AdamW optimizer({}, model.trained()), other({}, loaded.trained());
  TrainerState state;
  state.step = 1;
  state.adapters = "LoRA";
  write_checkpoint(folder.path(), state, model, optimizer, *byte_tokenizer());
  const std::string path = checkpoint_path(folder.path(), 1);
  load_checkpoint(path, verify_checkpoint(path), loaded, other);
  EXPECT_EQ(values_of(loaded.trained()), values_of(model.trained()));
}

// A step is one batch; the norm is summed in another order.
TEST(LoraRun, SumsMadeApartAreThoseThatRunOn) {
  const TempFolder folder;
  const LanguageModel<float> base = base_model();
  std::vector<std::vector<float>> trained;
  for (const char* sums : {"running", "apart"}) {
    TrainConfig config = lora_run(folder.path() + "/" + sums);
    config.sums = sums;
    config.steps = 3;
    const std::unique_ptr<Trainer> trainer = trainer_of(config, folder, base);
    ASSERT_TRUE(trainer->run(nullptr, nullptr));
    trained.push_back(values_of(trainer->model().trained()));
  }
  ASSERT_EQ(trained[0].size(), trained[1].size());
  for (size_t i = 0; i < trained[0].size(); ++i) EXPECT_NEAR(trained[0][i], trained[1][i], 1e-5);
}

// Of the model there are parameters alone; gradients and moments are the adapters'.
TEST(LoraRun, ThePlanHasNoGradientsAndMomentsOfTheModel) {
  TrainConfig config = tiny_run("run");
  const MemoryPlan whole = plan_memory(tiny_model(), config);
  config.lora = 2;
  config.from = "base";
  const MemoryPlan lora = plan_memory(tiny_model(), config);
  EXPECT_EQ(lora.base, whole.parameters);
  EXPECT_GT(lora.adapters, 0u);
  EXPECT_LT(lora.moments, whole.moments / 3);
  EXPECT_LT(lora.gradients, whole.gradients / 2);
  config.device = "cuda";
  const MemoryPlan on_gpu = plan_memory(tiny_model(), config);
  config.lora = 0;
  EXPECT_LT(on_gpu.base, plan_memory(tiny_model(), config).parameters * 2 / 3);  // bf16 without the rest
}

TEST(LoraRun, WithoutAModelIsAnError) {
  TrainConfig config = lora_run("run");
  config.from = "";
  EXPECT_THAT(error_of([&] { validate(config); }), HasSubstr("lora: expected 0 without from"));
  config.from = "base";
  config.lora_alpha = 0;
  EXPECT_THAT(error_of([&] { validate(config); }), HasSubstr("lora_alpha: expected a number > 0, got 0"));
}

}  // namespace
}  // namespace fw::testing
