// A whole model on the device alongside the same model on the CPU: logits, loss and gradients, a run of training, one
// that is resumed, decoding, states that go from one to the other. In the emulation and on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "base/device.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "cuda/device_runs.h"
#include "model/language_model.h"
#include "train/memory_plan.h"
#include "train/step.h"

namespace fw::testing {
namespace {

constexpr double kBound = 3e-2;  // of bf16 activations

ModelConfig tiny(const std::string& rule, const std::vector<std::string>& layers) {
  ModelConfig c;
  c.rule = rule;
  c.vocab_size = 67;
  c.hidden_size = 64;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  c.layers = layers;
  c.num_heads = 2;
  c.head_dim = 32;
  c.intermediate_size = 96;
  c.window.window = 24;
  return c;
}

std::vector<int32_t> random_ids(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(67));
  return ids;
}

struct Pair {
  explicit Pair(const ModelConfig& config) : host(config), device(config, cuda_device()) {
    Random random(3);
    host.init(random);
    for (const ParamSpec& spec : host.params().specs())
      device.params().write_values(spec, host.params().host_values(spec).span());
  }
  LanguageModel<float> host, device;
};

double norm_of(std::span<const float> x) {
  double sum = 0;
  for (const float one : x) sum += static_cast<double>(one) * static_cast<double>(one);
  return std::sqrt(sum);
}

double relative(std::span<const float> got, std::span<const float> want) {
  std::vector<float> difference(want.begin(), want.end());
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= got[i];
  return norm_of(difference) / std::max(norm_of(want), 1e-30);
}

struct Named {
  std::string name;
  ModelConfig config;
};

// Each gradient as a share of its own norm, or of a hundredth of that of all: what is a sum of many that cancel has no
// digits of its own in bf16.
void expect_gradients_of_the_cpu(const Pair& models) {
  std::vector<float> all;
  for (const ParamSpec& spec : models.host.params().specs()) {
    const HostView<float> view = models.host.params().host_grads(spec);
    all.insert(all.end(), view.span().begin(), view.span().end());
  }
  const double floor = 1e-2 * norm_of(all);
  for (const ParamSpec& spec : models.host.params().specs()) {
    const HostView<float> a = models.device.params().host_grads(spec), b = models.host.params().host_grads(spec);
    std::vector<float> difference(b.span().begin(), b.span().end());
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= a.span()[i];
    EXPECT_LE(norm_of(difference) / std::max(norm_of(b.span()), floor), kBound) << spec.name;
  }
}

class DeviceModel : public ::testing::TestWithParam<Named> {};

TEST_P(DeviceModel, LogitsLossAndGradientsAreThoseOfTheCpu) {
  Pair models(GetParam().config);
  const SeqLayout layout({0, 70, 75, 130});
  const std::vector<int32_t> ids = random_ids(layout.tokens(), 7);
  std::vector<int32_t> targets = random_ids(layout.tokens(), 8);
  targets[3] = -1;
  std::vector<float> want(ids.size() * 67), got(want.size());
  models.host.forward_all(ids, layout, nullptr, Mat<float>(want.data(), layout.tokens(), 67));
  models.device.forward_all(ids, layout, nullptr, Mat<float>(got.data(), layout.tokens(), 67));
  EXPECT_LE(relative(got, want), kBound) << "logits";

  std::vector<float> nll(ids.size());
  const double scale = 1.0 / static_cast<double>(ids.size());
  const LossSum expected = models.host.forward_backward(ids, targets, layout, scale),
                loss = models.device.forward_backward(ids, targets, layout, scale);
  EXPECT_EQ(loss.count, expected.count);
  EXPECT_NEAR(loss.nll, expected.nll, kBound * expected.nll);
  EXPECT_NEAR(models.device.evaluate(ids, targets, layout, nullptr, nll.data()).nll, loss.nll, 1e-3 * loss.nll);
  EXPECT_EQ(nll[3], 0.0F);
  expect_gradients_of_the_cpu(models);
}

// Of 130 rows 17 are scored: the head computes those alone, and their gradients go back to their places.
TEST_P(DeviceModel, FewScoredRowsAndTheLikeliestTokensAreThoseOfTheCpu) {
  Pair models(GetParam().config);
  const SeqLayout layout({0, 70, 75, 130});
  const std::vector<int32_t> ids = random_ids(layout.tokens(), 7), every = random_ids(layout.tokens(), 8);
  std::vector<int32_t> targets(ids.size(), -1);
  std::vector<int64_t> rows;
  for (size_t t = 1; t < ids.size(); t += 8) targets[t] = every[t], rows.push_back(static_cast<int64_t>(t));
  std::vector<float> nll(ids.size(), 7);
  const LossSum expected = models.host.forward_backward(ids, targets, layout, 0.06),
                loss = models.device.forward_backward(ids, targets, layout, 0.06);
  EXPECT_EQ(loss.count, static_cast<int64_t>(rows.size()));
  EXPECT_NEAR(loss.nll, expected.nll, kBound * expected.nll);
  EXPECT_NEAR(models.device.evaluate(ids, targets, layout, nullptr, nll.data()).nll, loss.nll, 1e-3 * loss.nll);
  for (size_t t = 0; t < nll.size(); ++t) EXPECT_EQ(nll[t] != 0, targets[t] >= 0) << t;
  expect_gradients_of_the_cpu(models);

  // The device's own logits say which is the largest.
  std::vector<int32_t> likeliest(rows.size());
  std::vector<float> logits(ids.size() * 67);
  models.device.likeliest(ids, rows, layout, nullptr, likeliest);
  models.device.forward_all(ids, layout, nullptr, Mat<float>(logits.data(), layout.tokens(), 67));
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = std::span(logits).subspan(static_cast<size_t>(rows[i]) * 67, 67);
    // Of rows taken alone the products may round otherwise: a token whose logit is as good to a bf16.
    EXPECT_GE(row[static_cast<size_t>(likeliest[i])],
              *std::ranges::max_element(row) - 1e-2F * std::abs(*std::ranges::max_element(row)))
        << rows[i];
  }
}

// Kernels of a decoded token's rows run in passes of several tokens too.
TEST_P(DeviceModel, FewTokensAreThoseOfTheCpu) {
  Pair models(GetParam().config);
  const std::vector<int32_t> ids = random_ids(8, 9);
  std::vector<float> got(67), want(67);
  for (const size_t count : {2, 5}) {
    ModelState<float> state(models.device.config(), 1, cuda_device()), of_host(models.host.config(), 1);
    const SeqLayout layout({0, static_cast<int64_t>(count)}), next({0, 1});
    models.device.forward_last(std::span(ids).first(count), layout, state, Mat<float>(got.data(), 1, 67));
    models.host.forward_last(std::span(ids).first(count), layout, of_host, Mat<float>(want.data(), 1, 67));
    EXPECT_LE(relative(got, want), kBound) << count;
    models.device.forward_last(std::span(ids).subspan(count, 1), next, state, Mat<float>(got.data(), 1, 67));
    models.host.forward_last(std::span(ids).subspan(count, 1), next, of_host, Mat<float>(want.data(), 1, 67));
    EXPECT_LE(relative(got, want), kBound) << "and one more";
  }
}

TEST_P(DeviceModel, DecodesAsItReadsAndItsStateGoesToTheCpu) {
  Pair models(GetParam().config);
  const std::vector<int32_t> ids = random_ids(40, 9);
  std::vector<float> all(ids.size() * 67);
  models.device.forward_all(ids, SeqLayout({0, 40}), nullptr, Mat<float>(all.data(), 40, 67));
  ModelState<float> state(models.device.config(), 1, cuda_device());
  std::vector<float> logits(67);
  const Mat<float> last(logits.data(), 1, 67);
  models.device.forward_last(std::span(ids).first(33), SeqLayout({0, 33}), state, last);
  for (size_t t = 33; t < 38; ++t)
    models.device.forward_last(std::span(ids).subspan(t, 1), SeqLayout({0, 1}), state, last);
  EXPECT_LE(relative(logits, std::span(all).subspan(static_cast<size_t>(37) * 67, 67)), kBound);

  const TempFolder folder;  // of this process alone: ctest runs the parts of this program side by side
  const std::string path = folder.path("state.safetensors"), rule = models.host.config().rule;
  state.save(path, rule, models.device.hash());
  ModelState<float> moved(models.host.config(), 1);
  moved.load(path, rule, models.host.hash());
  models.host.forward_last(std::span(ids).subspan(38, 1), SeqLayout({0, 1}), moved, last);
  models.device.forward_last(std::span(ids).subspan(38, 1), SeqLayout({0, 1}), state, Mat<float>(all.data(), 1, 67));
  EXPECT_LE(relative(std::span(all).first(67), logits), kBound);
}

std::vector<Named> models() {
  const auto with = [](ModelConfig c, auto change) {
    change(c);
    return c;
  };
  return {
      {"gated_deltanet2", tiny("gated_deltanet2", {"recurrent", "recurrent"})},
      {"kda", tiny("kda", {"recurrent"})},
      // Keys of more than 64 channels: training takes all gates of channels as logits (RecurrentMixer::gates_inside).
      {"gates_inside", with(tiny("gated_deltanet2", {"recurrent", "window"}),
                            [](ModelConfig& c) {
                              c.num_heads = 1, c.head_dim = 72;
                              c.decay_rank = c.output_gate_rank = 8;
                            })},
      {"gated_deltanet", tiny("gated_deltanet", {"recurrent"})},
      {"preconditioned", tiny("precond_gated_deltanet", {"recurrent"})},
      {"kaczmarz", tiny("kaczmarz", {"recurrent"})},
      {"qdelta", tiny("qdelta", {"recurrent"})},
      {"hybrid", tiny("gated_deltanet2", {"conv", "recurrent", "window", "attention"})},
      {"grouped_heads", with(tiny("gated_deltanet2", {"window", "attention"}),
                             [](ModelConfig& c) {
                               c.window.num_kv_heads = c.attention.num_kv_heads = 1;
                               c.window.num_heads = c.attention.num_heads = 2;
                             })},
      // Heads of 256 channels, of which a quarter is rotated, as Qwen3.5 has them.
      {"gated_attention", with(tiny("gated_deltanet", {"recurrent", "attention"}),
                               [](ModelConfig& c) {
                                 c.num_v_heads = 4;
                                 c.norm = "zero_centered_rms";
                                 c.attention.num_heads = 2, c.attention.num_kv_heads = 1, c.attention.head_dim = 256;
                                 c.attention.rope_fraction = 0.25;
                                 c.attention.qk_norm = c.attention.output_gate = true;
                               })},
      {"norms_behind", with(tiny("gated_deltanet", {"recurrent", "attention"}),
                            [](ModelConfig& c) {
                              c.allow_neg_eigval = true;
                              c.attention.qk_norm = c.attention.qk_norm_all_heads = c.attention.post_norm = true;
                              c.attention.rope_theta = 0;
                            })},
      {"mamba2", with(tiny("gated_deltanet2", {"ssd", "ssd"}),
                      [](ModelConfig& c) {
                        c.mlp = "none";
                        c.ssd.head_dim = 32;
                        c.ssd.state_size = 16;
                        c.ssd.num_groups = 2;
                      })},
      {"mamba", with(tiny("gated_deltanet2", {"mamba", "mamba"}), [](ModelConfig& c) { c.mlp = "none"; })},
      {"longhorn_diag", tiny("gated_deltanet2", {"longhorn_diag", "window"})},
      {"rwkv7", with(tiny("gated_deltanet2", {"rwkv7", "rwkv7"}),
                     [](ModelConfig& c) {
                       c.mlp = "channel_mix";
                       c.norm = "layer";
                       c.rwkv7.head_dim = 32;
                     })},
      {"mamba3", with(tiny("gated_deltanet2", {"mamba3", "mamba3"}),
                      [](ModelConfig& c) {
                        c.mlp = "none";
                        c.mamba3.head_dim = 32;
                        c.mamba3.state_size = 16;
                      })},
      {"mamba3_mimo", with(tiny("gated_deltanet2", {"mamba3", "window"}),
                           [](ModelConfig& c) {
                             c.mamba3.head_dim = 32;
                             c.mamba3.state_size = 16;
                             c.mamba3.num_groups = 2;
                             c.mamba3.mimo_rank = 3;
                             c.mamba3.output_norm = true;
                             c.mamba3.decay_activation = "heavy_tail";
                           })},
      {"mesa", tiny("gated_deltanet2", {"mesa", "window"})},
      {"mesa_in_chunks", with(tiny("gated_deltanet2", {"mesa", "window"}),
                              [](ModelConfig& c) {
                                c.mesa.head_dim = 64;
                                c.mesa.cg_steps = 30;
                              })},
      {"tied", with(tiny("gated_deltanet2", {"recurrent"}), [](ModelConfig& c) { c.tie_word_embeddings = true; })},
      // All experts are chosen: of nearly equal scores bf16 may choose otherwise than the CPU (DeviceExperts below).
      {"experts", with(tiny("gated_deltanet", {"recurrent", "attention"}),
                       [](ModelConfig& c) {
                         c.mlp = "experts";
                         c.experts.num_experts = c.experts.top_k = 4;
                         c.experts.intermediate_size = 40, c.experts.shared_size = 24;
                         c.experts.shared_gate = true;
                         c.experts.balance = 0.1;
                       })},
      {"sigmoid_experts", with(tiny("kda", {"mla", "recurrent"}),
                               [](ModelConfig& c) {
                                 c.mla.kv_rank = 16, c.mla.key_dim = c.mla.value_dim = 32, c.mla.shared_key_dim = 8;
                                 c.mlp = "experts";
                                 c.experts.num_experts = c.experts.top_k = 3;
                                 c.experts.router = "sigmoid", c.experts.correction_bias = true;
                                 c.experts.intermediate_size = 24, c.experts.shared_size = 24;
                                 c.experts.dense_layers = 1, c.experts.scale = 2.4;
                               })},
  };
}
INSTANTIATE_TEST_SUITE_P(Models, DeviceModel, ::testing::ValuesIn(models()),
                         [](const auto& one) { return one.param.name; });

Batch batch_of(uint64_t seed) {
  Batch batch;
  Random random(seed);
  // A token is followed by itself plus one, mostly: something to learn.
  for (int64_t t = 0; t < 128; ++t) {
    const int32_t before = batch.ids.empty() ? 0 : batch.ids.back();
    batch.ids.push_back(random.below(5) == 0 ? static_cast<int32_t>(random.below(67)) : (before + 1) % 67);
  }
  batch.targets.assign(batch.ids.begin() + 1, batch.ids.end());
  batch.targets.push_back(-1);
  batch.layout = SeqLayout({0, 64, 128});
  return batch;
}

double step(LanguageModel<float>& model, AdamW& optimizer, uint64_t i) {
  const Batch batch = batch_of(i);
  const StepResult result = train_step(model, optimizer, {&batch, 1}, 3e-3, 1.0);
  EXPECT_TRUE(result.finite);
  return result.nll / static_cast<double>(result.count);
}

TEST(DeviceTraining, FollowsTheCpu) {
  Pair models(tiny("gated_deltanet2", {"recurrent", "window"}));
  AdamW on_host({}, models.host.params()), on_device({}, models.device.params());
  double first = 0, last = 0;
  for (uint64_t i = 0; i < 8; ++i) {
    const double want = step(models.host, on_host, i), got = step(models.device, on_device, i);
    EXPECT_NEAR(got, want, 1e-2 * want) << "step " << i;
    (i == 0 ? first : last) = got;
  }
  EXPECT_LT(last, first);
}

// The same bits in a second run, with what backward recomputes, and from values and moments that were carried to
// another model.
TEST(DeviceTraining, HasTheSameBitsAgainRecomputedAndResumed) {
  const ModelConfig config = tiny("gated_deltanet2", {"recurrent", "window"});
  const auto values_of = [](const LanguageModel<float>& model) {
    std::vector<float> all;
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      all.insert(all.end(), view.span().begin(), view.span().end());
    }
    return all;
  };
  const auto run = [&](Recompute level, bool moves) {
    Pair models(config);
    models.device.set_recompute(level);
    AdamW optimizer({}, models.device.params());
    for (uint64_t i = 0; i < 2; ++i) step(models.device, optimizer, i);
    if (!moves) {
      step(models.device, optimizer, 2);
      return values_of(models.device);
    }
    LanguageModel<float> other(config, cuda_device());
    AdamW resumed({}, other.params());
    for (const ParamSpec& spec : other.params().specs()) {
      other.params().write_values(spec, models.device.params().host_values(spec).span());
      resumed.first().write(spec.offset, optimizer.first().host(spec.offset, spec.size()).span());
      resumed.second().write(spec.offset, optimizer.second().host(spec.offset, spec.size()).span());
    }
    resumed.set_updates(optimizer.updates());
    step(other, resumed, 2);
    return values_of(other);
  };
  const std::vector<float> undisturbed = run(Recompute::kNone, false);
  EXPECT_EQ(run(Recompute::kNone, false), undisturbed);
  EXPECT_EQ(run(Recompute::kMlp, false), undisturbed);
  EXPECT_EQ(run(Recompute::kAll, false), undisturbed);
  EXPECT_EQ(run(Recompute::kNone, true), undisturbed);
}

// Experts that not every token passes. bf16 chooses otherwise where two scores are nearly equal, so most tokens are
// compared, not all.
ModelConfig chosen_experts() {
  ModelConfig c = tiny("gated_deltanet", {"recurrent", "attention"});
  c.mlp = "experts";
  c.experts.num_experts = 8, c.experts.top_k = 3;
  c.experts.groups = 4, c.experts.top_groups = 3;
  c.experts.intermediate_size = 40, c.experts.shared_size = 24;
  c.experts.shared_gate = true;
  return c;
}

TEST(DeviceExpertModel, MostTokensAreThoseOfTheCpu) {
  Pair models(chosen_experts());
  const SeqLayout layout({0, 70, 75, 130});
  const std::vector<int32_t> ids = random_ids(layout.tokens(), 7), targets = random_ids(layout.tokens(), 8);
  std::vector<float> want(ids.size() * 67), got(want.size());
  models.host.forward_all(ids, layout, nullptr, Mat<float>(want.data(), layout.tokens(), 67));
  models.device.forward_all(ids, layout, nullptr, Mat<float>(got.data(), layout.tokens(), 67));
  int64_t near = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    const auto of_got = std::span(got).subspan(67 * t, 67), of_want = std::span(want).subspan(67 * t, 67);
    near += relative(of_got, of_want) <= kBound ? 1 : 0;
  }
  EXPECT_GE(near, 100) << "of 130 tokens";
  const double scale = 1.0 / static_cast<double>(ids.size());
  const LossSum expected = models.host.forward_backward(ids, targets, layout, scale),
                loss = models.device.forward_backward(ids, targets, layout, scale);
  EXPECT_NEAR(loss.nll, expected.nll, kBound * expected.nll);
  const std::vector<int64_t> load = models.device.take_expert_load(), of_host = models.host.take_expert_load();
  ASSERT_EQ(load.size(), 16U);
  int64_t elsewhere = 0;
  for (size_t i = 0; i < load.size(); ++i) elsewhere += std::abs(load[i] - of_host[i]);
  EXPECT_LE(elsewhere, 2 * 30);
  for (const size_t layer : {0, 8})
    EXPECT_EQ(std::accumulate(load.begin() + static_cast<int64_t>(layer),
                              load.begin() + static_cast<int64_t>(layer) + 8, int64_t{0}),
              3 * 130);
}

TEST(DeviceExpertModel, TrainsWithTheSameBitsRecomputed) {
  const auto run = [&](Recompute level) {
    LanguageModel<float> model(chosen_experts(), cuda_device());
    Random random(3);
    model.init(random);
    model.set_recompute(level);
    AdamW optimizer({}, model.params());
    std::vector<float> all;
    for (uint64_t i = 0; i < 2; ++i) all.push_back(static_cast<float>(step(model, optimizer, i)));
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      all.insert(all.end(), view.span().begin(), view.span().end());
    }
    return all;
  };
  EXPECT_EQ(run(Recompute::kAll), run(Recompute::kNone));
}

// The values of a parameter are split in two on the device: logits, losses, values and moments have the bits of whole
// ones, of values half way between two bf16 numbers too.
class DeviceMasters : public ::testing::TestWithParam<Named> {};
TEST_P(DeviceMasters, SplitOrWholeHaveTheSameBits) {
  const ModelConfig& config = GetParam().config;
  const auto run = [&](MasterFormat master_format) {
    LanguageModel<float> model(config, cuda_device(), master_format);
    EXPECT_EQ(model.params().split(), master_format == MasterFormat::kBf16PlusLow);
    Random random(3);
    model.init(random);
    std::vector<float> all;
    const auto keep = [&](std::span<const float> values) { all.insert(all.end(), values.begin(), values.end()); };
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      std::vector<float> values(view.span().begin(), view.span().end());
      for (size_t i = 0; i < values.size(); i += 3)
        values[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(values[i]) & 0xffff0000u) | 0x8000u);
      model.params().write_values(spec, values);
    }
    AdamW optimizer({}, model.params());
    for (uint64_t i = 0; i < (emulated() ? 2U : 3U); ++i) all.push_back(static_cast<float>(step(model, optimizer, i)));
    const std::vector<int32_t> ids = random_ids(30, 4);
    std::vector<float> logits(ids.size() * 67);
    model.forward_all(ids, SeqLayout({0, 30}), nullptr, Mat<float>(logits.data(), 30, 67));
    keep(logits);
    EXPECT_TRUE(model.parameters_finite());
    for (const ParamSpec& spec : model.params().specs()) {
      keep(model.params().host_values(spec).span());
      keep(optimizer.first().host(spec.offset, spec.size()).span());
      keep(optimizer.second().host(spec.offset, spec.size()).span());
    }
    return all;
  };
  EXPECT_EQ(run(MasterFormat::kBf16PlusLow), run(MasterFormat::kFp32));
}
INSTANTIATE_TEST_SUITE_P(Models, DeviceMasters, ::testing::ValuesIn(models()),
                         [](const auto& one) { return one.param.name; });

// The device with a count of what is allocated.
class CountingDevice final : public Device {
 public:
  fw_device kind() const override { return cuda_device().kind(); }
  size_t alignment() const override { return cuda_device().alignment(); }
  bool host_memory() const override { return false; }
  void* stream() const override { return cuda_device().stream(); }
  void* allocate(size_t bytes) override {
    void* memory = cuda_device().allocate(bytes);
    sizes_[memory] = bytes;
    bytes_ += bytes;
    peak_ = std::max(peak_, bytes_);
    return memory;
  }
  void release(void* memory) noexcept override {
    bytes_ -= sizes_[memory];
    sizes_.erase(memory);
    cuda_device().release(memory);
  }
  void from_host(void* to, const void* from, size_t bytes) override { cuda_device().from_host(to, from, bytes); }
  void to_host(void* to, const void* from, size_t bytes) override { cuda_device().to_host(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { cuda_device().copy(to, from, bytes); }
  void fill(void* to, int byte, size_t bytes) override { cuda_device().fill(to, byte, bytes); }
  void synchronise() override { cuda_device().synchronise(); }
  size_t peak() const { return peak_; }

 private:
  std::map<void*, size_t> sizes_;
  size_t bytes_ = 0, peak_ = 0;
};

TrainConfig run_of(int64_t batch, int64_t length) {
  TrainConfig train;
  train.device = "cuda";
  train.batch = batch;
  train.length = length;
  return train;
}

Batch whole_sequences(const TrainConfig& train) {
  Batch batch;
  batch.ids = random_ids(train.batch * train.length, 5);
  batch.targets = random_ids(train.batch * train.length, 6);
  batch.layout = SeqLayout::uniform(train.batch, train.length);
  return batch;
}

class DeviceStepPlan : public ::testing::TestWithParam<Named> {};

// What a plan says that was made without the device is what steps on the device take, to the byte, whatever is computed
// again.
TEST_P(DeviceStepPlan, IsWhatAStepTakes) {
  const ModelConfig& config = GetParam().config;
  for (const auto& [level, moments] :
       {std::pair<const char*, const char*>{"none", "float32"}, {"mlp", "float32"}, {"all", "bf16"}}) {
    SCOPED_TRACE(fmt::format("{}, moments {}", level, moments));
    TrainConfig train = run_of(emulated() ? 1 : 2, 70);
    train.recompute = level;
    train.moments = moments;
    const MemoryPlan plan = plan_memory(config, train);
    const auto peak_with = [&](const Scratch& scratch) {
      CountingDevice device;
      LanguageModel<float> model(config, device);
      Random random(3);
      model.init(random);
      model.set_recompute(plan.recompute);
      model.reserve_scratch(scratch);
      AdamW optimizer({.moments = plan.format}, model.params());
      const Batch batch = whole_sequences(train);
      EXPECT_TRUE(train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0).finite);
      return device.peak() + plan.libraries;
    };
    EXPECT_EQ(peak_with(plan.scratch), plan.total());
    // A little less would not have done: the arena takes another block.
    EXPECT_GT(peak_with({plan.scratch.kept - 256, plan.scratch.recomputed}), plan.total()) << "kept";
    if (plan.scratch.recomputed == 0) continue;
    EXPECT_GT(peak_with({plan.scratch.kept, plan.scratch.recomputed - 256}), plan.total()) << "recomputed";
  }
}
INSTANTIATE_TEST_SUITE_P(Models, DeviceStepPlan, ::testing::ValuesIn(models()),
                         [](const auto& one) { return one.param.name; });

// Less memory is less kept, and the same numbers.
TEST(DeviceStepPlan, FitsWhatItIsGivenWithTheSameBits) {
  const ModelConfig config = tiny("gated_deltanet2", {"recurrent", "window", "recurrent"});
  const auto values_of = [&](const MemoryPlan& plan, const TrainConfig& train) {
    CountingDevice device;
    LanguageModel<float> model(config, device);
    Random random(3);
    model.init(random);
    model.set_recompute(plan.recompute);
    model.reserve_scratch(plan.scratch);
    AdamW optimizer({}, model.params());
    const Batch batch = whole_sequences(train);
    for (int i = 0; i < 2; ++i) train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0);
    EXPECT_EQ(device.peak() + plan.libraries, plan.total());
    std::vector<float> all;
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      all.insert(all.end(), view.span().begin(), view.span().end());
    }
    return all;
  };
  TrainConfig train = run_of(2, 130);
  train.moments = "float32";  // other moments are other bits
  MemoryPlan plan = plan_memory(config, train);
  const std::vector<float> whole = values_of(plan, train);
  std::set<std::pair<Recompute, int64_t>> seen;
  try {
    for (;;) {
      train.memory = fmt::format("{}", plan.total() - 1);
      plan = plan_memory(config, train);
      EXPECT_LT(plan.total(), parse_bytes(train.memory).value() + 1);
      EXPECT_TRUE(seen.insert({plan.recompute.level, plan.recompute.layers}).second);
      EXPECT_EQ(values_of(plan, train), whole);
    }
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(fmt::format("{} bytes", plan.total())), std::string::npos) << error.what();
  }
  EXPECT_GE(seen.size(), 4U);
}

// A model that only runs keeps the bf16 weights of its files as they are, with the same bits.
TEST(DeviceFolder, Bf16WeightsStayBf16) {
  const TempFolder folder;
  ModelConfig config = chosen_experts();
  config.tie_word_embeddings = false;
  LanguageModel<float> made(config);
  Random random(3);
  made.init(random);
  save_model(folder.path(), made);
  std::deque<std::vector<Bf16>> rounded;
  // One matrix is float32, or none.
  const auto write = [&](bool all) {
    SafetensorsWriter writer;
    for (const ParamSpec& spec : made.params().specs()) {
      const HostView<float> view = made.params().host_values(spec);
      if (!spec.operand() || (!all && spec.name == "lm_head.weight")) {
        writer.add_copy<float>(spec.name, spec.shape, view.span());
        continue;
      }
      std::vector<Bf16>& numbers = rounded.emplace_back(view.span().size());
      round_to_bf16(static_cast<int64_t>(numbers.size()), view.span().data(), numbers.data());
      writer.add(spec.name, "BF16", spec.shape, std::as_bytes(std::span(numbers)));
    }
    writer.write(folder.path("model.safetensors"));
  };
  const std::vector<int32_t> ids = random_ids(70, 4);
  const auto load = [&](LoadFor use) {
    CountingDevice device;
    const LanguageModel<float> model = load_model<float>(folder.path(), device, use);
    return std::pair(model.hash(), device.peak());
  };
  const auto logits = [&](LoadFor use) {
    LanguageModel<float> model = load_model<float>(folder.path(), cuda_device(), use);
    std::vector<float> all(ids.size() * 67);
    model.forward_all(ids, SeqLayout({0, 70}), nullptr, Mat<float>(all.data(), 70, 67));
    return all;
  };
  write(true);
  const auto [hash, bytes] = load(LoadFor::kTraining);
  const auto [same, fewer] = load(LoadFor::kForward);
  EXPECT_EQ(same, hash);
  EXPECT_EQ(logits(LoadFor::kForward), logits(LoadFor::kTraining));
  int64_t operands = 0;
  for (const ParamSpec& spec : made.params().specs()) operands += spec.operand() ? spec.size() : 0;
  EXPECT_LE(fewer + static_cast<size_t>(2 * operands), bytes);
  write(false);
  const auto [mixed, all_bf16] = load(LoadFor::kForward);
  EXPECT_EQ(all_bf16, bytes);
  EXPECT_NE(mixed, hash);
  EXPECT_EQ(load(LoadFor::kTraining).first, mixed);
}

}  // namespace
}  // namespace fw::testing
