// The memory of a training step is planned to the byte: a real run takes what its plan says.
#include "train/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/plan_device.h"
#include "base/threads.h"
#include "rule/rule.h"
#include "train/step.h"
#include "training_support.h"

namespace fw {
namespace {

using testing::tiny_model;
using testing::tiny_run;

// The host with a count of what is allocated.
class CountingHost final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CPU; }
  size_t alignment() const override { return host_device().alignment(); }
  bool host_memory() const override { return true; }
  void* allocate(size_t bytes) override {
    void* memory = host_device().allocate(bytes);
    sizes_[memory] = bytes;
    bytes_ += bytes;
    peak_ = std::max(peak_, bytes_);
    return memory;
  }
  void release(void* memory) noexcept override {
    bytes_ -= sizes_[memory];
    sizes_.erase(memory);
    host_device().release(memory);
  }
  void from_host(void* to, const void* from, size_t bytes) override { host_device().from_host(to, from, bytes); }
  void to_host(void* to, const void* from, size_t bytes) override { host_device().to_host(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { host_device().copy(to, from, bytes); }
  void fill(void* to, int byte, size_t bytes) override { host_device().fill(to, byte, bytes); }
  void synchronise() override {}
  size_t peak() const { return peak_; }

 private:
  std::map<void*, size_t> sizes_;
  size_t bytes_ = 0, peak_ = 0;
};

// Peak of three real steps.
size_t real_peak(const ModelConfig& config, const TrainConfig& train) {
  CountingHost host;
  LanguageModel<float> model(config, host);
  Random random(1);
  model.init(random);
  AdamW optimizer({}, model.params());
  std::vector<Batch> batches(static_cast<size_t>(train.accumulate));
  for (Batch& batch : batches) {
    std::vector<int64_t> offsets = {0};
    for (int64_t s = 0; s < train.batch; ++s) {
      for (int64_t t = 0; t < train.length; ++t) batch.ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
      offsets.push_back(static_cast<int64_t>(batch.ids.size()));
    }
    batch.targets = batch.ids;
    batch.layout = SeqLayout(std::move(offsets));
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(train_step(model, optimizer, batches, 1e-3, 1.0).finite);
  return host.peak();
}

TEST(MemoryPlan, IsThePeakOfARealRunOfEveryRule) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    ModelConfig config = tiny_model();
    config.rule = preset.name;
    config.num_hidden_layers = 2;
    const TrainConfig train = tiny_run("run");
    EXPECT_EQ(plan_memory(config, train).total(), real_peak(config, train));
  }
}

TEST(MemoryPlan, FollowsEverySize) {
  const auto expect_same = [](const ModelConfig& config, const TrainConfig& train) {
    const MemoryPlan plan = plan_memory(config, train);
    EXPECT_EQ(plan.total(), real_peak(config, train));
    return plan.total();
  };
  ModelConfig config = tiny_model();
  TrainConfig train = tiny_run("run");
  const size_t base = expect_same(config, train);
  train.accumulate = 3;
  EXPECT_EQ(expect_same(config, train), base);
  train.batch = 7;
  train.length = 300;  // several blocks of the arena
  EXPECT_GT(expect_same(config, train), base);
  config.vocab_size = 5000;
  config.tie_word_embeddings = false;
  config.num_v_heads = 4;
  config.expand_v = 2;
  config.feature_map = "product";
  expect_same(config, train);
  const int threads = num_threads();
  set_num_threads(threads + 2);
  expect_same(config, train);
  set_num_threads(threads);
}

// The trainer's model has these bytes for activations; one document, so that its sequences are the plan's.
TEST(MemoryPlan, IsWhatTheTrainerTakes) {
  const testing::TempFolder folder;
  TrainConfig train = tiny_run(folder.path("run"));
  train.steps = 3;
  const auto file = testing::byte_file(std::string(5000, 'x'), folder.path("tokens"));
  Trainer trainer(train, tiny_model(), std::shared_ptr<const Tokenizer>(byte_tokenizer()), file, nullptr);
  EXPECT_TRUE(trainer.run(nullptr, nullptr));
  EXPECT_EQ(trainer.model().scratch_bytes(), plan_memory(tiny_model(), train).activations);
}

TEST(MemoryPlan, TakesNothingItself) {
  ModelConfig config;
  config.vocab_size = 32000;
  config.hidden_size = 2048;
  config.num_hidden_layers = 20;
  config.num_heads = 16;
  config.head_dim = 128;
  TrainConfig train = tiny_run("run");
  train.length = 4096;
  const MemoryPlan plan = plan_memory(config, train);
  EXPECT_GT(plan.total(), size_t{40} << 30);
  EXPECT_GE(plan.parameters, sizeof(float) * static_cast<size_t>(parameter_count(config)));
  EXPECT_EQ(plan.moments, 2 * plan.gradients);
}

}  // namespace
}  // namespace fw
