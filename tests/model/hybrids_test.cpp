// Released hybrids (Qwen3.5, OLMo hybrid, those with experts): folders as they are published, read and written back;
// what is wrong is named. Their values are checked by `fastweight verify` (tests/conformance).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include "base/file.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "model/interop/hf_config.h"
#include "model/other_tensors.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

const std::string kModels = FW_SOURCE_DIR "/tests/conformance/models/";

Json hf_config_of(const std::string& folder) { return Json::parse(read_file(folder + "/config.json")); }

std::string bytes_of(const TensorInfo& info) {
  return {reinterpret_cast<const char*>(info.bytes.data()), info.bytes.size()};
}

// Every tensor as name, type, shape and bytes, of all files of a folder that an index or one name names.
std::map<std::string, std::string> tensors_of(const std::string& folder) {
  const SafetensorsReader reader(folder + "/model.safetensors");
  std::map<std::string, std::string> all;
  for (const auto& [name, info] : reader.tensors()) all[name] = info.dtype + Json(info.shape).dump() + bytes_of(info);
  return all;
}

// Qwen3.5 as it is published: the text model inside a multimodal one, bf16, two shards with an index, a vision tower
// and a layer that predicts further tokens beside it.
class Published : public ::testing::Test {
 protected:
  Published() : model_(load_model<float>(kModels + "qwen3_5")) {
    const Json text = hf_config_of(kModels + "qwen3_5");
    config_ = {{"model_type", "qwen3_5"}, {"architectures", {"Qwen3_5ForConditionalGeneration"}},
               {"text_config", text},     {"vision_config", {{"depth", 2}, {"hidden_size", 8}}},
               {"image_token_id", 5},     {"tie_word_embeddings", true}};
    config_["text_config"].erase("architectures");
    const SafetensorsReader plain(kModels + "qwen3_5/model.safetensors");
    SafetensorsWriter shards[2];
    for (const auto& [name, info] : plain.tensors()) {
      const std::string theirs = "model.language_model." + name.substr(6);
      std::vector<float> values(static_cast<size_t>(info.count()));
      plain.read<float>(name, info.shape, values);
      std::vector<uint16_t>& rounded = kept_.emplace_back();
      for (const float value : values) {
        uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        rounded.push_back(static_cast<uint16_t>(bits >> 16));
      }
      const size_t shard = map_.size() % 2;
      shards[shard].add(theirs, "BF16", info.shape, std::as_bytes(std::span(rounded)));
      map_[theirs] = kShards[shard];
    }
    for (const char* other : {"model.visual.patch_embed.proj.weight", "mtp.fc.weight"}) {
      shards[1].add(other, "BF16", {2, 3}, std::as_bytes(std::span<const uint16_t>(kOther)));
      map_[other] = kShards[1];
    }
    for (const size_t i : {0, 1}) shards[i].write(folder_.path(kShards[i]));
    write();
  }
  void write() {
    write_file_atomic(folder_.path("config.json"), config_.dump());
    write_file_atomic(folder_.path("model.safetensors.index.json"), Json{{"weight_map", map_}}.dump());
  }
  std::string error() const {
    return error_of([&] { load_model<float>(folder_.path()); });
  }

  static constexpr const char* kShards[2] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  static constexpr uint16_t kOther[6] = {0x3f80, 0x4000, 0x4040, 0xbf80, 0, 1};
  TempFolder folder_;
  LanguageModel<float> model_;
  Json config_;
  std::map<std::string, std::string> map_;
  std::deque<std::vector<uint16_t>> kept_;
};

TEST_F(Published, IsReadAndWrittenBackWithEverythingBeside) {
  const LanguageModel<float> model = load_model<float>(folder_.path());
  EXPECT_EQ(parameter_count(model.config()), parameter_count(model_.config()));
  EXPECT_TRUE(model.config().tie_word_embeddings);
  const OtherTensors others(folder_.path());
  EXPECT_EQ(others.description(), "model.visual. (1 tensor), mtp. (1 tensor)");
  TempFolder ours, theirs;
  save_model(ours.path(), model);
  others.save(ours.path());
  const OtherTensors kept(ours.path());
  export_model(theirs.path(), load_model<float>(ours.path()), -1, &kept);
  EXPECT_EQ(hf_config_of(theirs.path()), config_);
  std::map<std::string, std::string> before;
  for (const char* shard : kShards) {
    const SafetensorsReader reader(folder_.path(shard));
    for (const auto& [name, info] : reader.tensors())
      before[name] = info.dtype + Json(info.shape).dump() + bytes_of(info);
  }
  EXPECT_EQ(tensors_of(theirs.path()), before);
}

TEST_F(Published, WhatIsWrongIsNamed) {
  const Json whole = config_;
  EXPECT_EQ(error(), "");
  config_["text_config"]["linear_key_head_dim"] = 16;
  write();
  EXPECT_NE(error().find("linear_attn"), std::string::npos) << error();
  config_ = whole;
  config_["tie_word_embeddings"] = false;
  write();
  EXPECT_NE(error().find("text_config: tie_word_embeddings: expected false as the key outside says, got true"),
            std::string::npos)
      << error();
  config_ = whole;
  config_.erase("text_config");
  write();
  EXPECT_NE(error().find("text_config: expected the object of the text model"), std::string::npos) << error();
  config_ = whole;
  config_["model_type"] = "qwen3_6";
  write();
  EXPECT_NE(error().find("(nearest: qwen3_5"), std::string::npos) << error();
  config_ = whole;
  map_["model.language_model.norm.weight"] = "../other.safetensors";
  write();
  EXPECT_NE(error().find("expected the name of a .safetensors file of this folder, got '../other.safetensors'"),
            std::string::npos)
      << error();
  map_["model.language_model.norm.weight"] = "model-00003-of-00002.safetensors";
  write();
  EXPECT_NE(error().find("1 of 3 shards that it names are not in the folder"), std::string::npos) << error();
}

TEST(Hybrids, ConfigurationsSayWhatLayersAre) {
  const ModelConfig qwen = config_from_hf(hf_config_of(kModels + "qwen3_5"), "here");
  EXPECT_EQ(qwen.norm, "zero_centered_rms");
  EXPECT_EQ(qwen.mixers(), "gated_deltanet + attention");
  const auto attention = std::get<AttentionSpec>(qwen.layer_spec(1));
  EXPECT_TRUE(attention.output_gate && attention.qk_norm && attention.qk_norm_zero_centered);
  EXPECT_EQ(attention.rotated, 4);
  const ModelConfig olmo = config_from_hf(hf_config_of(kModels + "olmo_hybrid"), "here");
  EXPECT_EQ(olmo.norm_position(0), NormPosition::kBefore);
  EXPECT_EQ(olmo.norm_position(1), NormPosition::kBehind);
  EXPECT_EQ(olmo.attention.rope_theta, 0);
  EXPECT_EQ(olmo.resolved_rule().gain_bound, 2);

  const auto error = [&](const char* model, const char* key, const Json& value) {
    Json json = hf_config_of(kModels + model);
    json[key] = value;
    return error_of([&] { config_from_hf(json, "here"); });
  };
  const auto says = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(says(error("qwen3_5", "layer_types", {"linear_attention", "mamba"}), "full_attention for every layer"));
  EXPECT_TRUE(says(error("qwen3_5", "layer_types", {"linear_attention"}), "a list of 2 names"));
  EXPECT_TRUE(says(error("qwen3_5", "attention_bias", true), "attention_bias: expected false"));
  EXPECT_TRUE(says(error("qwen3_5", "num_experts", 8), "num_experts: this key is not known here"));
  EXPECT_TRUE(says(error("qwen3_next", "decoder_sparse_step", 2), "decoder_sparse_step: expected 1"));
  EXPECT_TRUE(says(error("qwen3_5_moe", "num_experts_per_tok", 9), "top_k: expected at most the 4 experts"));
  EXPECT_TRUE(says(error("kimi_linear", "q_lora_rank", 8), "q_lora_rank"));
  EXPECT_TRUE(says(error("kimi_linear", "mlp_layer_types", {"sparse", "dense"}), "dense for the first layers"));
  EXPECT_TRUE(says(error("kimi_linear", "num_key_value_heads", 1), "num_key_value_heads"));
  EXPECT_TRUE(says(error("qwen3_5", "rope_parameters", {{"rope_type", "yarn"}}), "rope_type: expected \"default\""));
  EXPECT_TRUE(says(error("olmo_hybrid", "rope_parameters", nullptr), "{\"rope_theta\": null} for no rotation"));
  EXPECT_TRUE(says(error("olmo_hybrid", "num_attention_heads", 0), "num_attention_heads: expected 1 to"));
}

// The first releases of OLMo have three convolutions and other names of norms; they go back as they came.
TEST(Hybrids, OtherNamesOfTensorsAreRead) {
  const std::string plain = kModels + "olmo_hybrid";
  const SafetensorsReader reader(plain + "/model.safetensors");
  SafetensorsWriter writer;
  const std::string layer = "model.layers.0.";
  for (const auto& [name, info] : reader.tensors()) {
    if (name == layer + "input_layernorm.weight") {
      writer.add(layer + "attention_layer_norm.weight", info.dtype, info.shape, info.bytes);
    } else if (name.ends_with(".post_attention_layernorm.weight")) {
      // of layer 0 the MLP's; of layer 1, which is attention, the mixer's, as transformers 5.24 saves it
      writer.add(name.substr(0, layer.size()) + "feedforward_layer_norm.weight", info.dtype, info.shape, info.bytes);
    } else if (name == layer + "linear_attn.conv1d.weight") {
      const size_t row = info.bytes.size() / static_cast<size_t>(info.shape[0]);
      size_t at = 0;
      for (const auto& [part, rows] : {std::pair("q", 8), std::pair("k", 8), std::pair("v", 24)}) {
        const size_t bytes = row * static_cast<size_t>(rows);
        writer.add(layer + "linear_attn." + part + "_conv1d.weight", info.dtype, {rows, 1, info.shape[2]},
                   info.bytes.subspan(at, bytes));
        at += bytes;
      }
    } else {
      writer.add(name, info.dtype, info.shape, info.bytes);
    }
  }
  TempFolder first, ours, theirs;
  writer.write(first.path("model.safetensors"));
  Json config = hf_config_of(plain);
  config["linear_use_gate"] = true;
  write_file_atomic(first.path("config.json"), config.dump());
  const LanguageModel<float> model = load_model<float>(first.path());
  EXPECT_EQ(model.hash(), load_model<float>(plain).hash());
  save_model(ours.path(), model);
  export_model(theirs.path(), load_model<float>(ours.path()));
  EXPECT_EQ(tensors_of(theirs.path()), tensors_of(first.path()));
  EXPECT_EQ(hf_config_of(theirs.path()), config);
}

// Kimi Linear's published configuration says the same in other words.
TEST(Hybrids, KimiLinearAsPublished) {
  Json json = hf_config_of(kModels + "kimi_linear");
  const ModelConfig ours = config_from_hf(json, "here");
  EXPECT_EQ(ours.mixers(), "kda + mla");
  EXPECT_EQ(ours.dense_layers(), 1);
  EXPECT_EQ(ours.mlp_spec(1).experts.router.groups, 2);
  json["linear_attn_config"] = {{"head_dim", json["linear_head_dim"]},
                                {"num_heads", json["linear_num_heads"]},
                                {"short_conv_kernel_size", json["linear_conv_kernel_dim"]},
                                {"full_attn_layers", {2}},
                                {"kda_layers", {1}}};
  json["first_k_dense_replace"] = 1;
  for (const char* key :
       {"layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"})
    json.erase(key);
  ModelConfig published = config_from_hf(json, "here");
  published.hf = ours.hf;
  EXPECT_EQ(published, ours);
  json["linear_attn_config"]["full_attn_layers"] = {3};
  EXPECT_NE(error_of([&] { config_from_hf(json, "here"); }).find("full_attn_layers: expected numbers from 1 to 2"),
            std::string::npos);
}

// A tensor for each expert's matrix, as Qwen3-Next was published.
TEST(Hybrids, SingleExpertsAreRead) {
  const std::string whole = kModels + "qwen3_next";
  const TempFolder folder;
  const auto write = [&](const std::string& leave_out) {
    const SafetensorsReader reader(whole + "/model.safetensors");
    SafetensorsWriter writer;
    std::deque<std::vector<float>> kept;
    const auto add = [&](const std::string& name, std::vector<int64_t> shape, std::span<const float> values) {
      kept.emplace_back(values.begin(), values.end());
      if (name != leave_out) writer.add<float>(name, std::move(shape), kept.back());
    };
    for (const auto& [name, info] : reader.tensors()) {
      std::vector<float> values(static_cast<size_t>(info.count()));
      reader.read<float>(name, info.shape, values);
      const size_t at = name.find("experts.") + 8;
      if (info.shape.size() != 3 || at < 8 || name.find("conv1d") != std::string::npos) {
        add(name, info.shape, values);
        continue;
      }
      const bool both = name.ends_with("gate_up_proj");
      const int64_t rows = info.shape[1] / (both ? 2 : 1), count = rows * info.shape[2];
      for (int64_t i = 0; i * count < info.count(); ++i) {
        const char* what = !both ? "down_proj" : i % 2 == 0 ? "gate_proj" : "up_proj";
        add(fmt::format("{}{}.{}.weight", name.substr(0, at), both ? i / 2 : i, what), {rows, info.shape[2]},
            std::span(values).subspan(static_cast<size_t>(i * count), static_cast<size_t>(count)));
      }
    }
    writer.write(folder.path("model.safetensors"));
  };
  write_file_atomic(folder.path("config.json"), read_file(whole + "/config.json"));
  write("");
  const LanguageModel<float> model = load_model<float>(folder.path());
  EXPECT_EQ(model.hash(), load_model<float>(whole).hash());
  TempFolder ours, theirs;
  save_model(ours.path(), model);
  export_model(theirs.path(), load_model<float>(ours.path()));
  EXPECT_EQ(tensors_of(theirs.path()), tensors_of(folder.path()));
  write("model.layers.1.mlp.experts.2.up_proj.weight");
  EXPECT_NE(error_of([&] { load_model<float>(folder.path()); }).find("experts.2.up_proj.weight"), std::string::npos);
}

// The names that moonshotai's checkpoints have, with experts in bfloat16 and one of them not.
TEST(Hybrids, KimiLinearTensorsAsPublished) {
  const std::string whole = kModels + "kimi_linear", attn = "model.layers.0.self_attn.", moe = "model.layers.1.";
  const SafetensorsReader reader(whole + "/model.safetensors");
  SafetensorsWriter writer;
  std::deque<std::vector<float>> kept;
  std::deque<std::vector<uint16_t>> narrow;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, std::span<const float> values) {
    if (name.find(".experts.") == std::string::npos || name.ends_with("experts.2.w3.weight")) {
      writer.add<float>(name, std::move(shape), kept.emplace_back(values.begin(), values.end()));
      return;
    }
    std::vector<uint16_t>& bf16 = narrow.emplace_back();
    for (const float x : values) bf16.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
    writer.add(name, "BF16", shape, std::as_bytes(std::span(bf16)));
  };
  for (const auto& [name, info] : reader.tensors()) {
    std::vector<float> values(static_cast<size_t>(info.count()));
    reader.read<float>(name, info.shape, values);
    const int64_t size = info.count() / info.shape[0];
    const auto rows = [&](int64_t first, int64_t count) {
      return std::span(values).subspan(static_cast<size_t>(first * size), static_cast<size_t>(count * size));
    };
    if (name == attn + "conv1d.weight") {
      for (const auto& [part, first] : {std::pair("q", 0), std::pair("k", 16), std::pair("v", 32)})
        add(attn + part + "_conv1d.weight", {16, 1, info.shape[2]}, rows(first, 16));
    } else if (name.starts_with(attn + "forget_gate.")) {
      add(attn + name.substr(attn.size() + 12), info.shape, values);
    } else if (info.shape.size() == 3) {
      const bool both = name.ends_with("gate_up_proj");
      const int64_t count = info.shape[1] / (both ? 2 : 1) * info.shape[2];
      for (int64_t i = 0; i * count < info.count(); ++i) {
        const char* what = !both ? "w2" : i % 2 == 0 ? "w1" : "w3";
        add(fmt::format("{}block_sparse_moe.experts.{}.{}.weight", moe, both ? i / 2 : i, what),
            {count / info.shape[2], info.shape[2]},
            std::span(values).subspan(static_cast<size_t>(i * count), static_cast<size_t>(count)));
      }
    } else if (name.starts_with(moe + "mlp.")) {
      add(moe + "block_sparse_moe." + name.substr(moe.size() + 4), info.shape, values);
    } else {
      add(name, info.shape, values);
    }
  }
  const TempFolder published, ours, theirs;
  writer.write(published.path("model.safetensors"));
  write_file_atomic(published.path("config.json"), read_file(whole + "/config.json"));
  const LanguageModel<float> model = load_model<float>(published.path());
  // But for the experts' precision it is the model that transformers writes.
  const LanguageModel<float> same = load_model<float>(whole);
  for (const ParamSpec& spec : model.params().specs()) {
    const auto a = model.params().host_values(spec), b = same.params().host_values(spec);
    for (size_t i = 0; i < a.span().size(); ++i)
      ASSERT_NEAR(a.span()[i], b.span()[i], spec.stacked ? std::abs(b.span()[i]) / 128 : 0) << spec.name;
  }
  save_model(ours.path(), model);
  export_model(theirs.path(), load_model<float>(ours.path()));
  EXPECT_EQ(tensors_of(theirs.path()), tensors_of(published.path()));
}

// A model of such layers that was made here becomes a folder of transformers.
TEST(Hybrids, OurOwnAreExported) {
  for (const char* name : {"qwen3_5", "olmo_hybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear"}) {
    LanguageModel<float> model = load_model<float>(kModels + name);
    model.set_hf("");
    TempFolder theirs;
    export_model(theirs.path(), model);
    EXPECT_EQ(tensors_of(theirs.path()), tensors_of(kModels + name)) << name;
    EXPECT_EQ(load_model<float>(theirs.path()).hash(), model.hash());
  }
}

// For eval and generate a model whose products are all bf16 in its file keeps them so: the same bits, half the memory.
TEST(Bf16Weights, GiveTheSameBitsOnTheCpu) {
  for (const std::string name : {"qwen3_5", "olmo_hybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear"}) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    write_file_atomic(folder.path("config.json"), read_file(kModels + name + "/config.json"));
    const SafetensorsReader plain(kModels + name + "/model.safetensors");
    SafetensorsWriter writer;
    std::deque<std::vector<Bf16>> kept;
    for (const auto& [tensor, info] : plain.tensors()) {
      std::vector<float> values(static_cast<size_t>(info.count()));
      plain.read<float>(tensor, info.shape, values);
      std::vector<Bf16>& rounded = kept.emplace_back(values.size());
      round_to_bf16(info.count(), values.data(), rounded.data());
      writer.add(tensor, "BF16", info.shape, std::as_bytes(std::span(rounded)));
    }
    writer.write(folder.path("model.safetensors"));
    LanguageModel<float> wide = load_model<float>(folder.path()),
                         narrow = load_model<float>(folder.path(), host_device(), LoadFor::kForward);
    EXPECT_FALSE(wide.params().split());
    EXPECT_TRUE(narrow.params().split());
    EXPECT_EQ(narrow.hash(), wide.hash());
    const SeqLayout layout({0, 5, 19});
    const int64_t vocab = wide.config().vocab_size;
    const std::vector<int32_t> ids = random_ids(19, vocab, 3), targets = random_ids(19, vocab, 4);
    const auto results = [&](LanguageModel<float>& model) {
      Logits<float> all(19, vocab), last(1, vocab);
      model.forward_all(ids, layout, nullptr, all.mat());
      ModelState<float> state(model.config(), 1, model.device());
      for (size_t t = 0; t < 6; ++t) {
        model.forward_last(std::span(ids).subspan(t, 1), SeqLayout({0, 1}), state, last.mat());
        all.values.insert(all.values.end(), last.values.begin(), last.values.end());
      }
      all.values.push_back(static_cast<float>(model.evaluate(ids, targets, layout).nll));
      return all.values;
    };
    for (const Precision precision : {Precision::kNative, Precision::kBf16}) {
      wide.set_precision(precision);
      narrow.set_precision(precision);
      EXPECT_EQ(results(narrow), results(wide));
    }
    for (LanguageModel<float>* model : {&wide, &narrow}) {
      model->add_adapters({{2, 4.0, false, {}}, "base", false});
      Random random(6);
      for (const ParamSpec& spec : model->trained().specs()) {
        std::vector<float> values(static_cast<size_t>(spec.size()));
        for (float& x : values) x = static_cast<float>(random.normal());
        model->trained().write_values(spec, values);
      }
    }
    EXPECT_EQ(results(narrow), results(wide));
  }
}

}  // namespace
}  // namespace fw::testing
