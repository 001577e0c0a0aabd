// The memory of a training step is planned to the byte: a real run takes what its plan says.
#include "train/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/memory.h"
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

// Peak of three real steps, which recompute what is said.
size_t real_peak(const ModelConfig& config, const TrainConfig& train, const RecomputeLayers& recompute = {},
                 MomentFormat moments = MomentFormat::kFloat32) {
  CountingHost host;
  LanguageModel<float> model(config, host);
  Random random(1);
  model.init(random);
  model.set_recompute(recompute);
  AdamW optimizer({.moments = moments}, model.params());
  std::vector<Batch> batches(static_cast<size_t>(train.accumulate));
  for (Batch& batch : batches) {
    std::vector<int64_t> offsets = {0};
    for (int64_t s = 0; s < train.batch; ++s) {
      for (int64_t t = 0; t < train.length; ++t)
        batch.ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
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

// Every step down takes what its plan says and no more than was given, and the last one says what would do.
TEST(MemoryPlan, FitsWhatItIsGiven) {
  ModelConfig config = tiny_model();
  config.num_hidden_layers = 5;
  TrainConfig train = tiny_run("run");
  train.batch = 8;
  train.length = 512;  // a layer is some blocks of the arena
  train.moments = "float32";
  MemoryPlan plan = plan_memory(config, train);
  EXPECT_EQ(plan.recompute, RecomputeLayers{});
  train.memory = fmt::format("{}", plan.total());
  EXPECT_EQ(plan_memory(config, train).recompute.level, Recompute::kNone);
  bool some = false;
  int steps = 0;
  std::string message;
  for (;; ++steps) {
    train.memory = fmt::format("{}", plan.total() - 1);
    MemoryPlan next;
    try {
      next = plan_memory(config, train);
    } catch (const Error& error) {
      message = error.what();
      break;
    }
    EXPECT_LT(next.total(), plan.total());
    EXPECT_EQ(next.total(), real_peak(config, train, next.recompute)) << describe(next.recompute, 5);
    some = some || next.recompute.layers < 5;
    plan = next;
  }
  EXPECT_GE(steps, 3);
  EXPECT_TRUE(some);
  EXPECT_THAT(message, ::testing::HasSubstr(fmt::format("takes {} bytes", plan.total())));
  train.memory = fmt::format("{}", plan.total());
  EXPECT_EQ(plan_memory(config, train).total(), plan.total());
}

// Moments in bf16 come last: only where no step with float32 ones fits, and only if they may be either; then nothing is
// recomputed that need not be.
TEST(MemoryPlan, MomentsGiveWayLast) {
  ModelConfig config = tiny_model();
  config.num_hidden_layers = 5;
  TrainConfig train = tiny_run("run");
  train.batch = 8;
  train.length = 512;
  train.moments = "bf16";
  const MemoryPlan narrow = plan_memory(config, train);
  EXPECT_EQ(narrow.format, MomentFormat::kBf16);
  EXPECT_EQ(narrow.moments, narrow.gradients);  // 4 bytes a parameter as its gradient
  EXPECT_EQ(narrow.total(), real_peak(config, train, {}, MomentFormat::kBf16));
  train.moments = "auto";
  EXPECT_EQ(plan_memory(config, train).format, MomentFormat::kFloat32);

  // The least with float32 moments.
  train.moments = "float32";
  size_t least = plan_memory(config, train).total();
  std::string message;
  while (message.empty()) {
    train.memory = fmt::format("{}", least - 1);
    try {
      least = plan_memory(config, train).total();
    } catch (const Error& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, ::testing::HasSubstr("moments float32"));
  EXPECT_THAT(message, ::testing::HasSubstr("moments = bf16"));
  train.moments = "auto";
  train.memory = fmt::format("{}", least);
  EXPECT_EQ(plan_memory(config, train).format, MomentFormat::kFloat32);
  train.memory = fmt::format("{}", least - 1);
  const MemoryPlan plan = plan_memory(config, train);
  EXPECT_EQ(plan.format, MomentFormat::kBf16);
  EXPECT_LT(plan.total(), least);
  EXPECT_EQ(plan.total(), real_peak(config, train, plan.recompute, plan.format));
  train.moments = "bf16";
  EXPECT_EQ(plan_memory(config, train).recompute, plan.recompute);
  EXPECT_EQ(plan_memory(config, train).total(), plan.total());
  train.moments = "auto";
  train.memory = "1M";
  EXPECT_THROW(plan_memory(config, train), Error);
}

TEST(MemoryPlan, SizesAreReadAsTheyAreWritten) {
  EXPECT_EQ(parse_bytes("22G"), uint64_t{22} << 30);
  EXPECT_EQ(parse_bytes("22GiB"), uint64_t{22} << 30);
  EXPECT_EQ(parse_bytes("22GB"), uint64_t{22'000'000'000});
  EXPECT_EQ(parse_bytes("1.5K"), uint64_t{1536});
  EXPECT_EQ(parse_bytes("12345"), uint64_t{12345});
  for (const char* bad :
       {"", "G", "22X", "22g", "22 G", "-1G", "0", "0.5", "1e30T", "nan", "inf", "22GBB", "22Gi", "22B"}) {
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
  }
}

// A GPU's plan needs no GPU: 16 bytes a parameter, or 12, and activations of bf16.
TEST(MemoryPlan, OfAGpuNeedsNone) {
  ModelConfig config;
  config.vocab_size = 32000;
  config.hidden_size = 2048;
  config.num_hidden_layers = 20;
  config.num_heads = 16;
  config.head_dim = 128;
  TrainConfig train = tiny_run("run");
  train.batch = 8;
  train.length = 2048;
  const MemoryPlan host = plan_memory(config, train);
  train.device = "cuda";
  const MemoryPlan device = plan_memory(config, train);
  EXPECT_EQ(device.operands, 0U);  // half of the parameters
  EXPECT_NEAR(static_cast<double>(device.parameters), static_cast<double>(host.parameters),
              1e-3 * static_cast<double>(host.parameters));
  EXPECT_EQ(device.gradients, host.gradients);
  EXPECT_EQ(device.activations, device.scratch.total());
  EXPECT_LT(device.activations, host.activations);
  EXPECT_GT(device.libraries, 0U);
  train.memory = "40G";
  const MemoryPlan fitted = plan_memory(config, train);
  EXPECT_LE(fitted.total(), size_t{40} << 30);
  EXPECT_NE(fitted.recompute.level, Recompute::kNone);
  EXPECT_EQ(fitted.format, MomentFormat::kFloat32);
  train.memory = "22G";
  const MemoryPlan small = plan_memory(config, train);
  EXPECT_LE(small.total(), size_t{22} << 30);
  EXPECT_EQ(small.format, MomentFormat::kBf16);
  EXPECT_EQ(small.moments, small.gradients);
  train.moments = "float32";
  EXPECT_THROW(plan_memory(config, train), Error);
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

// A sum beside the gradient; nothing else.
TEST(MemoryPlan, OfGradientsMadeApart) {
  TrainConfig train = tiny_run("run");
  const MemoryPlan running = plan_memory(tiny_model(), train);
  train.sums = "apart";
  const MemoryPlan apart = plan_memory(tiny_model(), train);
  EXPECT_EQ(apart.gradients, 2 * running.gradients);
  EXPECT_EQ(apart.total(), running.total() + running.gradients);
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

size_t decoding_peak(const ModelConfig& config, int64_t sequences, int64_t ring) {
  CountingHost host;
  LanguageModel<float> model(config, host);
  Random random(1);
  model.init(random);
  model.set_decode_ring(ring);
  ModelState<float> states(config, sequences, host);
  const std::unique_ptr<Decoder<float>> decoder = model.decoder(states);
  for (int i = 0; i < 20; ++i) {
    decoder->sample(config.vocab_size, {}, std::vector<double>(static_cast<size_t>(sequences), 0.5), false);
    decoder->step();
    decoder->wait();
  }
  return host.peak();
}

// A state after each token of a pass, and what the larger pass takes.
TEST(MemoryPlan, DecodingHasItsDrafts) {
  const ModelConfig config = tiny_model();
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  for (const int64_t sequences : {1, 5}) {
    size_t before = plan_decoding(config, sequences);
    for (const int64_t drafts : {1, 6, 16}) {
      const size_t plan = plan_decoding(config, sequences, std::nullopt, FW_DEVICE_CPU, drafts);
      const auto states = layers * sizeof(float) * static_cast<size_t>(config.layer_state(0)[0].size() * sequences);
      EXPECT_GT(plan, plan_decoding(config, sequences) + states * static_cast<size_t>(drafts + 1));
      EXPECT_GT(plan, before) << sequences << " sequences, " << drafts << " drafts";
      before = plan;
    }
  }
}

// To the byte: rings of 64 sequences, and their positions.
TEST(MemoryPlan, DecodingHasItsRings) {
  ModelConfig config = tiny_model();
  config.num_heads = 2, config.num_v_heads = 4, config.head_dim = 16;
  constexpr int64_t kSequences = 64;
  const auto rings = [&](int64_t tokens, int64_t decays) {
    const int64_t row = 16 + 16 + decays;
    return static_cast<size_t>(kSequences) *
           (sizeof(float) * static_cast<size_t>(config.num_hidden_layers * 4 * tokens * row) + sizeof(int32_t));
  };
  const auto decays_of = [](const std::string& rule) {
    return rule == "kda" ? int64_t{16} : rule == "retnet" ? int64_t{0} : int64_t{1};
  };
  for (const char* rule : {"gated_deltanet", "kda", "retnet"}) {
    config.rule = rule;
    for (const fw_device kind : {FW_DEVICE_CPU, FW_DEVICE_CUDA}) {
      const size_t without = plan_decoding(config, kSequences, 0, kind);
      for (const int64_t tokens : {1, 5, 16, 64}) {
        EXPECT_EQ(plan_decoding(config, kSequences, tokens, kind), without + rings(tokens, decays_of(rule)))
            << rule << ' ' << tokens;
      }
      EXPECT_EQ(plan_decoding(config, kSequences, std::nullopt, kind), without);
    }
    EXPECT_EQ(decoding_peak(config, kSequences, 16), decoding_peak(config, kSequences, 0) + rings(16, decays_of(rule)))
        << rule << ", of a real run";
  }
}

// What is read or written without training has its memory too: states and passes, more with more of them.
TEST(MemoryPlan, PassesAndSequencesThatAreNotOfAStep) {
  ModelConfig config = tiny_model();
  config.hidden_size = 256;
  config.intermediate_size = 1024;
  const size_t states = ModelState<float>(config, 64).bytes();
  EXPECT_GE(plan_decoding(config, 64), states);
  EXPECT_LT(plan_decoding(config, 1), plan_decoding(config, 64));
  const size_t residual = 4096 * static_cast<size_t>(config.hidden_size) * sizeof(float);
  EXPECT_GE(plan_pass(config, 4096), residual);
  EXPECT_LT(plan_pass(config, 256), plan_pass(config, 4096));
  TrainConfig train = tiny_run("out");
  const double alone = memory_beside_steps(config, train, false, false);
  EXPECT_GT(memory_beside_steps(config, train, true, false), alone)
      << "an evaluation's pass is longer than this run's step";
  train.eval_every = 1;
  EXPECT_GE(memory_beside_steps(config, train, false, true), alone + parameter_count(config) * sizeof(float))
      << "a test reads the best model";
}

}  // namespace
}  // namespace fw
