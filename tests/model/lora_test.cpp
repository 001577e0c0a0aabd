// LoRA adapters of models of every kind of layer: what they compute, their gradients, their folders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "model/adapters.h"
#include "model/model_files.h"
#include "model/small_model.h"
#include "support/finite_difference.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

struct Kind {
  std::string name;
  ModelConfig config;
};

ModelConfig config_of(const StringList& layers) {
  ModelConfig c = small_config("gated_deltanet2");
  c.layers = layers;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  return c;
}

std::vector<Kind> kinds() {
  std::vector<Kind> list{{"recurrent", config_of({"recurrent"})},
                         {"attention", config_of({"attention"})},
                         {"window_and_conv", config_of({"window", "conv"})},
                         {"ssd", config_of({"ssd"})},
                         {"mamba", config_of({"mamba"})},
                         {"mesa", config_of({"mesa"})},
                         {"rwkv7", config_of({"rwkv7", "rwkv7"})},
                         {"mamba3", config_of({"mamba3"})},
                         {"latent", config_of({"mla"})},
                         {"experts", config_of({"recurrent", "attention"})}};
  const auto config = [&](size_t i) -> ModelConfig& { return list[i].config; };
  config(0).rule = "kda";
  config(0).decay_rank = config(0).output_gate_rank = 4;
  config(0).feature_map = "product";
  config(1).attention.num_kv_heads = 1;
  config(1).attention.qkv_bias = true;
  config(2).window.window = 7;
  config(3).ssd.head_dim = 6;
  config(3).ssd.state_size = 5;
  config(4).mamba.state_size = 5;
  config(4).mamba.dt_rank = 3;
  config(5).mesa.head_dim = 5;
  config(6).norm = "layer";
  config(6).mlp = "channel_mix";
  config(6).rwkv7 = {6, 3, 4, 5, 7, 0};
  config(7).mamba3.head_dim = 6;
  config(7).mamba3.state_size = 8;
  config(8).mla.kv_rank = 5;
  config(8).mla.key_dim = config(8).mla.value_dim = 4;
  config(8).mla.shared_key_dim = 3;
  config(9).mlp = "experts";
  config(9).experts.num_experts = 4;
  config(9).experts.top_k = 2;
  config(9).experts.intermediate_size = 6;
  config(9).experts.shared_size = 5;
  return list;
}

AdapterConfig adapters(StringList modules = {}) { return {{3, 6.0, false, std::move(modules)}, "base", false}; }

template <class T>
void fill_adapters(LanguageModel<T>& model, double deviation = 0.3) {
  Random random(9);
  for (const ParamSpec& spec : model.trained().specs()) {
    std::vector<T> values(static_cast<size_t>(spec.size()));
    for (T& x : values) x = static_cast<T>(deviation * random.normal());
    model.trained().write_values(spec, values);
  }
}

template <class T>
std::vector<T> logits_of(LanguageModel<T>& model) {
  const SeqLayout layout({0, 9, 10, 24});
  Logits<T> logits(layout.tokens(), model.config().vocab_size);
  model.forward_all(random_ids(layout.tokens(), model.config().vocab_size, 1), layout, nullptr, logits.mat());
  return logits.values;
}

// Decoded: 4 tokens at once, then one at a time.
template <class T>
std::vector<T> decoded(LanguageModel<T>& model) {
  const std::vector<int32_t> ids = random_ids(8, model.config().vocab_size, 3);
  ModelState<T> state(model.config(), 1, model.device());
  Logits<T> logits(1, model.config().vocab_size);
  model.forward_last(std::span(ids).first(4), SeqLayout({0, 4}), state, logits.mat());
  for (size_t t = 4; t < ids.size(); ++t) {
    model.forward_last(std::span(ids).subspan(t, 1), SeqLayout({0, 1}), state, logits.mat());
  }
  return logits.values;
}

class LoraOf : public ::testing::TestWithParam<Kind> {};

TEST_P(LoraOf, BeginsAsTheBaseToTheBit) {
  LanguageModel<float> model = noisy_model<float>(GetParam().config);
  const std::vector<float> base = logits_of(model), base_decoded = decoded(model);
  model.add_adapters(adapters());
  Random random(2);
  model.trained().init(random);
  EXPECT_EQ(logits_of(model), base);
  EXPECT_EQ(decoded(model), base_decoded);
}

TEST_P(LoraOf, GradientsOfAAndBEqualCentralDifferences) {
  constexpr double kScale = 0.37;
  LanguageModel<double> model = noisy_model<double>(GetParam().config);
  model.add_adapters(adapters());
  fill_adapters(model);
  const SeqLayout layout({0, 9, 10, 24});
  const std::vector<int32_t> ids = random_ids(layout.tokens(), model.config().vocab_size, 1),
                             targets = random_ids(layout.tokens(), model.config().vocab_size, 2);
  model.begin_step();
  model.forward_backward(ids, targets, layout, kScale);
  Params<double>& params = model.trained();
  const std::vector<double> grads(params.grads().begin(), params.grads().end());
  const auto loss = [&] { return kScale * model.evaluate(ids, targets, layout).nll; };
  for (size_t p = 0; p < params.specs().size(); ++p) {
    const ParamSpec& spec = params.specs()[p];
    double diff = 0, norm = 0;
    for (const size_t i : sample_indices(static_cast<size_t>(spec.size()), 3, p)) {
      const size_t at = static_cast<size_t>(spec.offset) + i;
      const double expected = difference(loss, params.values()[at], 2e-5);
      diff += (grads[at] - expected) * (grads[at] - expected);
      norm += expected * expected;
    }
    EXPECT_LE(std::sqrt(diff), 1e-6 * std::max(std::sqrt(norm), 1e-2)) << spec.name;
    EXPECT_GT(norm, 0) << spec.name << " has no effect";
  }
}

// Levels of recomputation keep every bit.
TEST_P(LoraOf, RecomputedPassesHaveTheSameGradients) {
  LanguageModel<float> model = noisy_model<float>(GetParam().config);
  model.add_adapters(adapters());
  fill_adapters(model);
  const SeqLayout layout({0, 9, 24});
  const std::vector<int32_t> ids = random_ids(24, model.config().vocab_size, 1);
  const auto gradients = [&](Recompute level) {
    model.set_recompute(level);
    model.begin_step();
    model.forward_backward(ids, ids, layout, 1);
    return std::vector<float>(model.trained().grads().begin(), model.trained().grads().end());
  };
  EXPECT_EQ(gradients(Recompute::kAll), gradients(Recompute::kNone));
}

TEST_P(LoraOf, MergedWeightsComputeTheSame) {
  LanguageModel<double> model = noisy_model<double>(GetParam().config);
  const std::vector<double> base = logits_of(model);
  model.add_adapters(adapters());
  fill_adapters(model);
  const std::vector<double> adapted = logits_of(model), adapted_decoded = decoded(model);
  EXPECT_GT(distance(adapted, base), 1e-2);
  merge_adapters(model);
  EXPECT_EQ(model.adapters(), nullptr);
  EXPECT_LE(distance(logits_of(model), adapted), 1e-10);
  EXPECT_LE(distance(decoded(model), adapted_decoded), 1e-10);
}

INSTANTIATE_TEST_SUITE_P(Kinds, LoraOf, ::testing::ValuesIn(kinds()), [](const auto& kind) { return kind.param.name; });

// One projection of a product of several: of the merged weights only its own are others.
TEST(Lora, AnAdapterBelongsToOneProjectionOfAStack) {
  LanguageModel<double> model = noisy_model<double>(config_of({"attention", "recurrent"}));
  std::vector<std::vector<double>> before;
  for (const ParamSpec& spec : model.params().specs()) {
    const HostView<double> view = model.params().host_values(spec);
    before.emplace_back(view.span().begin(), view.span().end());
  }
  model.add_adapters(adapters({"k_proj", "mlp.up_proj"}));
  fill_adapters(model);
  EXPECT_EQ(model.trained().specs().size(), 8u);
  const std::vector<double> adapted = logits_of(model);
  merge_adapters(model);
  EXPECT_LE(distance(logits_of(model), adapted), 1e-12);
  for (size_t i = 0; i < before.size(); ++i) {
    const ParamSpec& spec = model.params().specs()[i];
    const HostView<double> view = model.params().host_values(spec);
    const bool changed = !std::equal(before[i].begin(), before[i].end(), view.span().begin());
    EXPECT_EQ(changed, spec.name.ends_with(".k_proj.weight") || spec.name.ends_with(".up_proj.weight")) << spec.name;
  }
}

TEST(Lora, ProductsInBf16AreNearThoseInFloat32) {
  LanguageModel<float> model = noisy_model<float>(config_of({"attention"}));
  model.add_adapters(adapters());
  fill_adapters(model);
  const std::vector<float> exact = logits_of(model);
  model.set_precision(Precision::kBf16);
  const std::vector<float> rounded = logits_of(model);
  EXPECT_LE(distance(rounded, exact), 3e-2);
  EXPECT_GT(distance(rounded, exact), 0);
}

class LoraFolder : public ::testing::Test {
 protected:
  LoraFolder() : model_(noisy_model<float>(config_of({"attention", "recurrent"}))) {
    model_.add_adapters(adapters({"q_proj", "down_proj"}));
    fill_adapters(model_);
    save_adapters(folder_.path(), model_);
  }
  // What reading says when keys of adapter_config.json are these.
  std::string error_with(const nlohmann::json& keys) {
    nlohmann::json json = nlohmann::json::parse(read_file(folder_.path() + "/adapter_config.json"));
    json.update(keys);
    write_file_atomic(folder_.path() + "/adapter_config.json", json.dump());
    return error_for(config_of({"attention", "recurrent"}));
  }
  std::string error_for(const ModelConfig& config) {
    LanguageModel<float> model = noisy_model<float>(config);
    return error_of([&] { load_adapters(folder_.path(), model); });
  }

  TempFolder folder_;
  LanguageModel<float> model_;
};

TEST_F(LoraFolder, HasPeftsTensorsAndIsReadToTheBit) {
  const SafetensorsReader reader(folder_.path() + "/adapter_model.safetensors");
  EXPECT_EQ(reader.tensors().size(), 8u);
  const TensorInfo& b = reader.tensors().at("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight");
  EXPECT_EQ(b.shape, (std::vector<int64_t>{12, 3}));
  EXPECT_EQ(b.dtype, "F32");
  LanguageModel<float> other = noisy_model<float>(config_of({"attention", "recurrent"}));
  load_adapters(folder_.path(), other);
  EXPECT_EQ(logits_of(other), logits_of(model_));
  EXPECT_EQ(other.hash(), model_.hash());
}

// PEFT's tensors of experts: A [E rank, in], and B [out, rank E] with the experts of a rank side by side.
TEST(Lora, AdaptersOfExpertsHavePeftsTensors) {
  const ModelConfig config = kinds().back().config;
  const std::string module = "base_model.model.model.layers.1.mlp.experts.";
  struct Case {
    StringList modules;
    std::map<std::string, std::vector<int64_t>> shapes;
    nlohmann::json parameters;
  };
  const std::vector<int64_t> inner_a{12, 12}, inner_b{12, 12}, outer_a{12, 6}, outer_b{12, 12};
  const Case cases[] = {{{},
                         {{"base_layer.lora_A.weight", inner_a},
                          {"base_layer.lora_B.weight", inner_b},
                          {"lora_A.weight", outer_a},
                          {"lora_B.weight", outer_b}},
                         {"experts.down_proj", "experts.gate_up_proj"}},
                        {{"experts.down_proj"},
                         {{"lora_A.weight", outer_a}, {"lora_B.weight", outer_b}},
                         nlohmann::json::array({"experts.down_proj"})},
                        {{"gate_up_proj"},
                         {{"lora_A.weight", inner_a}, {"lora_B.weight", inner_b}},
                         nlohmann::json::array({"experts.gate_up_proj"})}};
  for (const Case& one : cases) {
    LanguageModel<float> model = noisy_model<float>(config), other = noisy_model<float>(config);
    model.add_adapters(adapters(one.modules));
    fill_adapters(model);
    const TempFolder folder;
    save_adapters(folder.path(), model);
    const SafetensorsReader reader(folder.path() + "/adapter_model.safetensors");
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const auto& [name, info] : reader.tensors()) {
      if (name.starts_with(module)) shapes[name.substr(module.size())] = info.shape;
    }
    EXPECT_EQ(shapes, one.shapes);
    const nlohmann::json json = nlohmann::json::parse(read_file(folder.path() + "/adapter_config.json"));
    EXPECT_EQ(json["target_parameters"], one.parameters);
    EXPECT_EQ(json["target_modules"].is_null(), !one.modules.empty());
    load_adapters(folder.path(), other);
    EXPECT_EQ(logits_of(other), logits_of(model));
    // The column of rank 1 and expert 2 is that expert's.
    const auto file_b =
        std::as_const(model).trained().find(one.modules.empty() ? "model.layers.1.mlp.experts.base_layer.lora_B.weight"
                                                                : "model.layers.1.mlp.experts.lora_B.weight");
    const ParamSpec& spec = model.trained().specs()[static_cast<size_t>(file_b)];
    std::vector<float> from_file(static_cast<size_t>(spec.size()));
    reader.read<float>(adapter_tensor(spec), outer_b, from_file);
    const HostView<float> ours = model.trained().host_values(spec);
    EXPECT_EQ(from_file[5 * 12 + 1 * 4 + 2], ours.span()[(2 * 12 + 5) * 3 + 1]);
  }
}

// Of another program's names. Parameters that lie between each other's rows there (a query beside its gate, keys
// beside values of a head) are rows of one projection.
TEST(Lora, RowsOfAnotherProgramsTensors) {
  const std::string models = FW_SOURCE_DIR "/tests/conformance/models/";
  for (const std::string name : {"qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"}) {
    const SafetensorsReader base(models + name + "/model.safetensors");
    SafetensorsWriter writer;
    std::map<std::string, std::vector<float>> expected;
    Random random(5);
    constexpr int64_t kRank = 2;
    for (const auto& [tensor, info] : base.tensors()) {
      if (info.shape.size() != 2 || !tensor.starts_with("model.layers.") || !tensor.ends_with("proj.weight")) continue;
      const int64_t out = info.shape[0], in = info.shape[1];
      std::vector<float> a(static_cast<size_t>(kRank * in)), b(static_cast<size_t>(out * kRank));
      for (std::vector<float>* values : {&a, &b}) {
        for (float& x : *values) x = static_cast<float>(random.normal());
      }
      std::vector<float>& sum = expected[tensor];
      sum.resize(static_cast<size_t>(out * in));
      base.read<float>(tensor, info.shape, sum);
      for (int64_t row = 0; row < out; ++row) {
        for (int64_t r = 0; r < kRank; ++r) {
          for (int64_t c = 0; c < in; ++c)
            sum[static_cast<size_t>(row * in + c)] +=
                b[static_cast<size_t>(row * kRank + r)] * a[static_cast<size_t>(r * in + c)];
        }
      }
      const std::string module = "base_model.model." + tensor.substr(0, tensor.size() - 7);
      writer.add_copy<float>(module + ".lora_A.weight", {kRank, in}, a);
      writer.add_copy<float>(module + ".lora_B.weight", {out, kRank}, b);
    }
    TempFolder folder, again, merged;
    writer.write(folder.path("adapter_model.safetensors"));
    write_file_atomic(folder.path("adapter_config.json"), R"({"peft_type": "LORA", "r": 2, "lora_alpha": 2})");
    LanguageModel<float> model = load_model<float>(models + name);
    load_adapters(folder.path(), model);
    save_adapters(again.path(), model);
    const SafetensorsReader ours(again.path("adapter_model.safetensors")),
        theirs(folder.path("adapter_model.safetensors"));
    ASSERT_EQ(ours.tensors().size(), theirs.tensors().size());
    for (const auto& [tensor, info] : theirs.tensors()) {
      const auto got = ours.tensors().at(tensor).bytes;
      EXPECT_TRUE(std::equal(got.begin(), got.end(), info.bytes.begin(), info.bytes.end())) << name << " " << tensor;
    }
    merge_adapters(model);
    export_model(merged.path(), model);
    const SafetensorsReader result(merged.path("model.safetensors"));
    for (const auto& [tensor, values] : expected) {
      std::vector<float> got(values.size());
      result.read<float>(tensor, base.tensors().at(tensor).shape, got);
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(got[i], values[i], 1e-5) << name << " " << tensor << " " << i;
    }
  }
}

TEST_F(LoraFolder, ValuesThatMeanNothingAreNamed) {
  EXPECT_THAT(error_with({{"r", 0}}), HasSubstr("adapter_config.json': r: expected a number > 0, got 0"));
  EXPECT_THAT(error_with({{"r", 3}, {"lora_alpha", 0}}), HasSubstr("lora_alpha: expected a number > 0, got 0"));
  EXPECT_THAT(error_with({{"lora_alpha", 6}, {"peft_type", "IA3"}}),
              HasSubstr("peft_type: expected LORA, got \"IA3\""));
  EXPECT_THAT(error_with({{"peft_type", "LORA"}, {"use_dora", true}}), HasSubstr("use_dora: expected none, got true"));
  EXPECT_THAT(error_with({{"use_dora", false}, {"r", 4}}), HasSubstr("lora_A.weight"));
}

TEST_F(LoraFolder, AdaptersOfAnotherModelAreNamed) {
  ModelConfig wider = config_of({"attention", "recurrent"});
  wider.intermediate_size = 24;
  EXPECT_THAT(error_for(wider), HasSubstr("down_proj.lora_A.weight"));
  EXPECT_THAT(error_for(config_of({"attention"})), HasSubstr("unexpected tensor 'base_model.model.model.layers.1."));
}

TEST(Lora, AnUnknownProjectionIsAnErrorThatNamesThoseThereAre) {
  LanguageModel<float> model = noisy_model<float>(config_of({"attention"}));
  const std::string error = error_of([&] { model.add_adapters(adapters({"q_proj", "query"})); });
  EXPECT_THAT(error, HasSubstr("lora_modules: 'query'"));
  EXPECT_THAT(error, HasSubstr("down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"));
  EXPECT_EQ(model.adapters(), nullptr);
  EXPECT_THAT(error_of([&] { model.add_adapters(adapters({"lm_head"})); }), HasSubstr("lora_modules: 'lm_head'"));
}

TEST(Lora, AlphaOverTheRootOfTheRankWhereTheRankStabilises) {
  EXPECT_EQ((LoraConfig{16, 32, false, {}}.scale()), 2);
  EXPECT_EQ((LoraConfig{16, 32, true, {}}.scale()), 8);
}

}  // namespace
}  // namespace fw::testing
