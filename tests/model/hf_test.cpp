// Folders of flash-linear-attention: what they say in our configuration, and both ways without loss.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "model/interop/hf_config.h"
#include "model/small_model.h"
#include "support/shared.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

Json read_json(const std::string& path) { return Json::parse(read_file(path)); }

void expect_same_tensors(const std::string& a, const std::string& b) {
  const SafetensorsReader left(a), right(b);
  ASSERT_EQ(left.tensors().size(), right.tensors().size());
  for (const auto& [name, info] : left.tensors()) {
    ASSERT_TRUE(right.has(name)) << name;
    const TensorInfo& other = right.tensors().at(name);
    EXPECT_EQ(info.dtype, other.dtype) << name;
    EXPECT_EQ(info.shape, other.shape) << name;
    ASSERT_EQ(info.bytes.size(), other.bytes.size()) << name;
    EXPECT_EQ(std::memcmp(info.bytes.data(), other.bytes.data(), info.bytes.size()), 0) << name;
  }
}

// Folders of the models that are known.
std::vector<std::string> models() {
  std::vector<std::string> folders;
  for (const char* name : {"vectors/models", "vectors_more/models", "vectors_hf/models"}) {
    const std::string folder = shared_path(name);
    if (folder.empty()) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (unknown_hf_model(read_json(entry.path().string() + "/config.json")).empty())
        folders.push_back(entry.path().string());
    }
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

class HfConformance : public ::testing::TestWithParam<std::string> {
 protected:
  const std::string& source() const { return GetParam(); }
};

TEST_P(HfConformance, ExportAfterImportIsTheSame) {
  TempFolder ours, theirs;
  save_model(ours.path(), load_model<float>(source()));  // import
  EXPECT_EQ(read_json(ours.path("config.json"))["model_type"], "fastweight");
  export_model(theirs.path(), load_model<float>(ours.path()));
  EXPECT_EQ(read_json(theirs.path("config.json")), read_json(source() + "/config.json"));
  expect_same_tensors(source() + "/model.safetensors", theirs.path("model.safetensors"));
}

TEST_P(HfConformance, ImportAfterExportIsTheSame) {
  LanguageModel<float> model = load_model<float>(source());
  model.set_hf("");  // as if it had been trained here
  TempFolder before, theirs, after;
  save_model(before.path(), model);
  export_model(theirs.path(), load_model<float>(before.path()));
  LanguageModel<float> back = load_model<float>(theirs.path());
  EXPECT_EQ(back.hash(), model.hash());
  back.set_hf("");
  EXPECT_EQ(back.config().mixers(), model.config().mixers());
  if (model.config().has_recurrence()) {
    EXPECT_EQ(back.config().resolved_rule(), model.config().resolved_rule());
  }
  save_model(after.path(), back);
  expect_same_tensors(before.path("model.safetensors"), after.path("model.safetensors"));
  const std::vector<int32_t> ids = random_ids(20, model.config().vocab_size, 1);
  EXPECT_EQ(back.evaluate(ids, ids, SeqLayout({0, 20})).nll, model.evaluate(ids, ids, SeqLayout({0, 20})).nll);
}

INSTANTIATE_TEST_SUITE_P(Hf, HfConformance, ::testing::ValuesIn(models()),
                         [](const auto& hf) { return std::filesystem::path(hf.param).filename().string(); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HfConformance);

Json gated_config() {
  return {{"model_type", "gated_deltanet"},
          {"hidden_size", 32},
          {"num_hidden_layers", 2},
          {"num_heads", 2},
          {"head_dim", 8},
          {"expand_v", 1.5},
          {"vocab_size", 50},
          {"norm_eps", 1e-6},
          {"hidden_ratio", 4},
          {"conv_size", 3},
          {"bos_token_id", 1},
          {"my_own_key", {{"a", "text"}}}};
}

TEST(HfConfig, ConfigurationInOurWords) {
  const ModelConfig c = config_from_hf(gated_config(), "here");
  EXPECT_EQ(c.rule, "gated_deltanet");
  EXPECT_EQ(c.head_v_dim(), 12);
  EXPECT_EQ(c.mlp_size(), 256);
  EXPECT_EQ(c.output_gate, "silu");
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_EQ(config_to_hf(c), gated_config());
  EXPECT_EQ(config_from_json(config_to_json(c), "written"), c);
}

TEST(HfConfig, WhatIsNotComputedHereIsAnError) {
  const auto error = [](const char* key, const Json& value) {
    Json json = gated_config();
    json[key] = value;
    return error_of([&] { config_from_hf(json, "'f/config.json'"); });
  };
  EXPECT_EQ(error("bos_token_id", "x"), "");
  for (const auto& [key, value] : std::vector<std::pair<const char*, Json>>{{"use_short_conv", false},
                                                                            {"hidden_act", "gelu"},
                                                                            {"num_heads", 2.5},
                                                                            {"num_heads", 1e30},
                                                                            {"head_dim", -1},
                                                                            {"expand_v", "wide"},
                                                                            {"hidden_ratio", -1e300},
                                                                            {"use_gate", 1},
                                                                            {"num_v_heads", 3}}) {
    const std::string words = error(key, value);
    EXPECT_NE(words.find("'f/config.json': " + std::string(key)), std::string::npos) << key << ": " << words;
  }
  EXPECT_NE(error("attn", {{"layers", {1}}}).find("attn: num_heads"), std::string::npos);
  EXPECT_NE(
      error("attn", {{"layers", {2}}, {"num_heads", 2}}).find("attn: layers: expected numbers from 0 to 1, got 2"),
      std::string::npos);
  EXPECT_NE(error("attn", {{"num_heads", 2}}).find("attn: layers"), std::string::npos);
  EXPECT_NE(error("attn", {{"layers", {1}}, {"num_heads", 3}}).find("divides hidden_size = 32"), std::string::npos);
  EXPECT_NE(error("attn", {{"layers", {1}}, {"num_heads", 2}, {"window_size", -4}}).find("mixer.window.window"),
            std::string::npos);
  EXPECT_NE(error("attn", "all").find("attn: expected an object"), std::string::npos);
  EXPECT_NE(error("model_type", "rwkv6").find("rwkv6"), std::string::npos);
  EXPECT_NE(error("mixer_override", {{"type", "kda"}}).find("kda as mixer"), std::string::npos);
  EXPECT_NE(error("mixer_override", "gdn2").find("gated_deltanet as mixer"), std::string::npos);
  EXPECT_NE(error("model_type", "gdn2").find("got gdn2"), std::string::npos);
  EXPECT_NE(error("mixer_override", {{"type", "gdn9"}}).find("gdn9"), std::string::npos);
  EXPECT_NE(error("mixer_override", Json::object()).find("without a type"), std::string::npos);
}

Json rwkv7_config() {
  return {{"model_type", "rwkv7"}, {"hidden_size", 48}, {"num_hidden_layers", 3},
          {"head_dim", 16},        {"vocab_size", 50},  {"a_low_rank_dim", 4}};
}

TEST(HfConfig, Rwkv7InOurWords) {
  const ModelConfig c = config_from_hf(rwkv7_config(), "here");
  EXPECT_EQ(c.layers, StringList{"rwkv7"});
  EXPECT_EQ(c.norm, "layer");
  EXPECT_TRUE(c.embedding_norm);
  EXPECT_EQ(c.mlp_size(), 192);
  const Rwkv7Spec spec = c.rwkv7_spec(1);
  EXPECT_EQ(spec.heads(), 3);
  EXPECT_EQ(spec.rate_rank, 4);
  EXPECT_EQ(spec.decay_rank, 32);  // at least that
  EXPECT_EQ(spec.key_eps, 1e-6);   // norms are fused unless it says otherwise
  EXPECT_TRUE(c.rwkv7_spec(0).first);
  EXPECT_FALSE(spec.first);
  EXPECT_EQ(config_to_hf(c), rwkv7_config());
  EXPECT_EQ(config_from_json(config_to_json(c), "written"), c);

  // By heads instead of their width, and the widths as published for 2,048 channels.
  Json json = rwkv7_config();
  json.erase("head_dim");
  json.update({{"num_heads", 32}, {"hidden_size", 2048}, {"a_low_rank_dim", nullptr}, {"fuse_norm", false}});
  const Rwkv7Spec wide = config_from_hf(json, "here").rwkv7_spec(0);
  EXPECT_EQ(wide.dim, 64);
  EXPECT_EQ(std::vector<int64_t>({wide.decay_rank, wide.rate_rank, wide.value_rank, wide.gate_rank}),
            (std::vector<int64_t>{128, 128, 64, 224}));
  EXPECT_EQ(wide.key_eps, 0);

  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"hidden_act", "relu"},
                                                 {"norm_bias", false},
                                                 {"head_dim", 7},
                                                 {"head_dim", 0},
                                                 {"value_dim", 24},
                                                 {"value_dim", {48, 48, 24}},
                                                 {"hidden_ratio", -1},
                                                 {"attn", {{"layers", {1}}, {"num_heads", 2}}}}) {
    Json wrong = rwkv7_config();
    wrong[key] = value;
    const std::string words = error_of([&] { config_from_hf(wrong, "'f/config.json'"); });
    EXPECT_NE(words.find("'f/config.json': "), std::string::npos) << key << ": " << words;
    EXPECT_NE(words.find(key), std::string::npos) << key << ": " << words;
  }
}

Json mamba3_config() {
  return {{"model_type", "mamba3"}, {"hidden_size", 48}, {"num_hidden_layers", 3},
          {"head_dim", 16},         {"vocab_size", 50},  {"state_size", 12}};
}

TEST(HfConfig, Mamba3InOurWords) {
  const ModelConfig c = config_from_hf(mamba3_config(), "here");
  EXPECT_EQ(c.layers, StringList{"mamba3"});
  EXPECT_EQ(c.mlp, "none");
  const Mamba3Spec spec = c.mamba3_spec();
  EXPECT_EQ(spec.heads, 6);
  EXPECT_EQ(spec.angles, 3);
  EXPECT_EQ(spec.mimo_rank, 0);
  EXPECT_FALSE(spec.rotate_half);
  EXPECT_FALSE(spec.decay.heavy_tail);
  EXPECT_EQ(spec.decay.floor, 1e-4);
  EXPECT_EQ(config_to_hf(c), mamba3_config());
  EXPECT_EQ(config_from_json(config_to_json(c), "written"), c);

  Json json = mamba3_config();
  json.update({{"is_mimo", true},
               {"rope_fraction", 1.0},
               {"n_groups", 3},
               {"A_floor", 1e-3},
               {"is_outproj_norm", true},
               {"a_activation", "heavy_tail"}});
  const Mamba3Spec mimo = config_from_hf(json, "here").mamba3_spec();
  EXPECT_EQ(mimo.mimo_rank, 4);  // unless it says otherwise
  EXPECT_EQ(mimo.angles, 6);
  EXPECT_EQ(mimo.groups, 3);
  EXPECT_TRUE(mimo.rotate_half);
  EXPECT_TRUE(mimo.output_norm);
  EXPECT_TRUE(mimo.decay.heavy_tail);
  EXPECT_EQ(mimo.decay.floor, 1e-3);
  json["is_mimo"] = false;
  json["mimo_rank"] = 4;  // says nothing then
  EXPECT_EQ(config_from_hf(json, "here").mamba3_spec().mimo_rank, 0);

  for (const auto& [key, value] : std::vector<std::pair<const char*, Json>>{{"hidden_act", "relu"},
                                                                            {"use_bias", true},
                                                                            {"head_dim", 7},
                                                                            {"head_dim", 0},
                                                                            {"num_heads", 5},
                                                                            {"expand", 0},
                                                                            {"n_groups", 4},
                                                                            {"rope_fraction", 0.25},
                                                                            {"a_activation", "exp"},
                                                                            {"A_floor", -1}}) {
    Json wrong = mamba3_config();
    wrong[key] = value;
    const std::string words = error_of([&] { config_from_hf(wrong, "'f/config.json'"); });
    EXPECT_NE(words.find("'f/config.json': "), std::string::npos) << key << ": " << words;
  }
}

Json mamba_ssm_config() {
  return {{"d_model", 24},
          {"n_layer", 2},
          {"d_intermediate", 100},
          {"vocab_size", 50},
          {"pad_vocab_size_multiple", 16},
          {"attn_layer_idx", Json::array()},
          {"ssm_cfg",
           {{"layer", "Mamba3"},
            {"headdim", 12},
            {"d_state", 8},
            {"is_mimo", true},
            {"mimo_rank", 2},
            {"chunk_size", 16}}}};
}

TEST(HfConfig, ModelsOfStateSpacesMambaInOurWords) {
  EXPECT_TRUE(is_hf_config(mamba_ssm_config()));
  EXPECT_EQ(unknown_hf_model(mamba_ssm_config()), "");
  const ModelConfig c = config_from_hf(mamba_ssm_config(), "here");
  EXPECT_EQ(c.layers, StringList{"mamba3"});
  EXPECT_EQ(c.vocab_size, 64);
  EXPECT_EQ(c.mlp_size(), 128);
  EXPECT_TRUE(c.tie_word_embeddings);
  EXPECT_EQ(c.norm_eps, 1e-5);
  const Mamba3Spec spec = c.mamba3_spec();
  EXPECT_EQ(spec.heads, 4);
  EXPECT_EQ(spec.mimo_rank, 2);
  EXPECT_EQ(spec.angles, 2);
  EXPECT_TRUE(spec.rotate_half);
  EXPECT_TRUE(spec.decay.heavy_tail);
  EXPECT_EQ(config_to_hf(c), mamba_ssm_config());
  EXPECT_EQ(config_from_json(config_to_json(c), "written"), c);

  for (const auto& [key, value] : std::vector<std::pair<const char*, Json>>{{"d_model", 0},
                                                                            {"d_intermediate", -1},
                                                                            {"pad_vocab_size_multiple", 0},
                                                                            {"rms_norm", false},
                                                                            {"attn_layer_idx", {1}},
                                                                            {"ssm_cfg", {{"layer", "Mamba2"}}},
                                                                            {"ssm_cfg", 3}}) {
    Json wrong = mamba_ssm_config();
    wrong[key] = value;
    const std::string words = error_of([&] { config_from_hf(wrong, "'f/config.json'"); });
    EXPECT_NE(words.find("'f/config.json': "), std::string::npos) << key << ": " << words;
    EXPECT_NE(words.find(key), std::string::npos) << key << ": " << words;
  }
}

// Its MLP is two tensors, what is gated before the gate in the first, and a tied head lies beside the embedding.
TEST(HfConfig, ModelsOfStateSpacesMambaBothWays) {
  ModelConfig config = config_from_hf(mamba_ssm_config(), "here");
  config.hf.clear();  // as if it were a model of our own
  LanguageModel<float> model = noisy_model<float>(config);
  TempFolder theirs, ours, again;
  export_model(theirs.path(), model);
  EXPECT_EQ(read_json(theirs.path("config.json")).count("model_type"), 0U);
  const SafetensorsReader reader(theirs.path("model.safetensors"));
  for (const char* name : {"backbone.embedding.weight", "backbone.layers.1.norm.weight",
                           "backbone.layers.1.norm2.weight", "backbone.layers.1.mixer.mimo_x",
                           "backbone.layers.1.mlp.fc2.weight", "backbone.norm_f.weight", "lm_head.weight"}) {
    EXPECT_TRUE(reader.has(name)) << name;
  }
  EXPECT_EQ(reader.tensors().at("backbone.layers.0.mlp.fc1.weight").shape, (std::vector<int64_t>{256, 24}));
  std::vector<float> both(size_t{256} * 24), head(size_t{64} * 24), embedding(head.size());
  reader.read<float>("backbone.layers.0.mlp.fc1.weight", std::vector<int64_t>{256, 24}, both);
  const auto values = [&](const char* name) {
    const HostView<float> view =
        model.params().host_values(model.params().specs()[static_cast<size_t>(model.params().find(name))]);
    return std::vector<float>(view.span().begin(), view.span().end());
  };
  const auto half = static_cast<std::ptrdiff_t>(both.size() / 2);
  EXPECT_EQ(std::vector<float>(both.begin(), both.begin() + half), values("model.layers.0.mlp.up_proj.weight"));
  EXPECT_EQ(std::vector<float>(both.begin() + half, both.end()), values("model.layers.0.mlp.gate_proj.weight"));
  reader.read<float>("lm_head.weight", std::vector<int64_t>{64, 24}, head);
  reader.read<float>("backbone.embedding.weight", std::vector<int64_t>{64, 24}, embedding);
  EXPECT_EQ(head, embedding);

  LanguageModel<float> back = load_model<float>(theirs.path());
  EXPECT_EQ(back.hash(), model.hash());
  const std::vector<int32_t> ids = random_ids(20, 50, 1);
  EXPECT_EQ(back.evaluate(ids, ids, SeqLayout({0, 20})).nll, model.evaluate(ids, ids, SeqLayout({0, 20})).nll);
  save_model(ours.path(), back);
  export_model(again.path(), load_model<float>(ours.path()));
  EXPECT_EQ(read_json(again.path("config.json")), read_json(theirs.path("config.json")));
  expect_same_tensors(theirs.path("model.safetensors"), again.path("model.safetensors"));

  // A head that is another matrix is no tied head.
  SafetensorsWriter writer;
  head[7] += 1;
  for (const auto& [name, info] : reader.tensors()) {
    if (name == "lm_head.weight") {
      writer.add<float>(name, info.shape, head);
    } else {
      writer.add(name, info.dtype, info.shape, info.bytes);
    }
  }
  writer.write(again.path("model.safetensors"));
  EXPECT_NE(error_of([&] { load_model<float>(again.path()); }).find("lm_head.weight: expected the embedding's values"),
            std::string::npos);
}

// The same model as flash-linear-attention has it and in the form of its authors' program.
TEST(HfConfig, BothProgramsFormsAreOneModel) {
  const std::string source = shared_path("vectors_more/models/mamba3_heavy");
  if (source.empty()) GTEST_SKIP() << kNoShared;
  const LanguageModel<float> model = load_model<float>(source);
  TempFolder theirs;
  const SafetensorsReader reader(source + "/model.safetensors");
  SafetensorsWriter writer;
  for (const auto& [name, info] : reader.tensors()) {
    writer.add(name == "backbone.embeddings.weight" ? "backbone.embedding.weight" : name, info.dtype, info.shape,
               info.bytes);
  }
  writer.write(theirs.path("model.safetensors"));
  const Json config = {{"d_model", 32},           {"n_layer", 2},
                       {"vocab_size", 101},       {"pad_vocab_size_multiple", 1},
                       {"tie_embeddings", false}, {"ssm_cfg", {{"layer", "Mamba3"}, {"headdim", 16}, {"d_state", 16}}}};
  write_file_atomic(theirs.path("config.json"), config.dump());
  EXPECT_EQ(load_model<float>(theirs.path()).hash(), model.hash());
}

TEST(HfConfig, UnknownModelsAreNamed) {
  EXPECT_EQ(unknown_hf_model(gated_config()), "");
  EXPECT_EQ(unknown_hf_model({{"model_type", "transformer"}}), "");
  EXPECT_EQ(unknown_hf_model({{"model_type", "rwkv6"}}), "rwkv6");
  EXPECT_FALSE(is_hf_config({{"model_type", "fastweight"}}));
  EXPECT_FALSE(is_hf_config(Json::array()));
  EXPECT_FALSE(is_hf_config(Json::object()));
}

TEST(HfConfig, HybridsInOurWords) {
  Json json = gated_config();
  json["num_hidden_layers"] = 4;
  json["attn"] = {{"layers", {1, 3}}, {"num_heads", 4},   {"num_kv_heads", 2},
                  {"qkv_bias", true}, {"window_size", 9}, {"rope_theta", 500}};
  const ModelConfig c = config_from_hf(json, "here");
  EXPECT_EQ(c.layers, (StringList{"recurrent", "window"}));
  EXPECT_EQ(c.window.window, 9);
  const AttentionSpec spec = c.attention_spec(c.window, c.window.window);
  EXPECT_EQ(spec.heads, 4);
  EXPECT_EQ(spec.kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.rope_theta, 500);
  EXPECT_TRUE(spec.qkv_bias);
  EXPECT_FALSE(spec.qk_norm);
  json["attn"]["layers"] = {0, 3};
  json["attn"].erase("window_size");
  // and attention again
  EXPECT_EQ(config_from_hf(json, "here").layers, (StringList{"attention", "recurrent", "recurrent"}));
  json["attn"]["layers"] = Json::array();
  EXPECT_TRUE(config_from_hf(json, "here").layers.empty());
}

// Models of our own: those that FLA has a layer for, and what the error says of those that it has none for.
TEST(HfConfig, ExportsModelsOfOurOwn) {
  const auto exported = [](const std::string& rule, auto change) {
    ModelConfig c = small_config(rule);
    change(c);
    const Json json = config_to_hf(c);
    const ModelConfig back = config_from_hf(json, "written");
    EXPECT_EQ(parameter_count(back), parameter_count(c));
    return json["model_type"].get<std::string>();
  };
  EXPECT_EQ(exported("deltanet", [](ModelConfig&) {}), "delta_net");
  EXPECT_EQ(exported("deltanet_neg", [](ModelConfig& c) { c.output_gate = "none"; }), "delta_net");
  EXPECT_EQ(exported("gated_deltanet", [](ModelConfig& c) { c.num_v_heads = 4; }), "gated_deltanet");
  EXPECT_EQ(exported("precond_gated_deltanet", [](ModelConfig& c) { c.precond_x = 1.25; }), "precond_gated_deltanet");
  EXPECT_EQ(exported("linear_attention",
                     [](ModelConfig& c) {
                       c.conv_size = 0;
                       c.output_gate = "none";
                     }),
            "linear_attn");
  EXPECT_EQ(exported("kda",
                     [](ModelConfig& c) {
                       c.output_gate = "sigmoid";
                       c.output_gate_rank = c.decay_rank = 8;
                     }),
            "kda");
  EXPECT_EQ(exported("retnet",
                     [](ModelConfig& c) {
                       c.rope_theta = 10000;
                       c.conv_size = 0;  // which FLA's model does not hand to its layer
                     }),
            "retnet");
  for (const char* key : {"use_inner_decay", "use_output_correction"}) {  // nor these
    Json json = gated_config();
    json["model_type"] = "comba";
    EXPECT_EQ(error_of([&] { config_from_hf(json, "here"); }), "");
    json[key] = false;
    EXPECT_NE(error_of([&] { config_from_hf(json, "here"); }).find(key), std::string::npos);
  }

  EXPECT_EQ(exported("gated_deltanet", [](ModelConfig& c) { c.layers = {"recurrent", "window"}; }), "gated_deltanet");
  EXPECT_EQ(exported("gated_deltanet2", [](ModelConfig& c) { c.layers = {"attention"}; }), "transformer");
  const auto rwkv7 = [](ModelConfig& c) {
    c.layers = {"rwkv7"};
    c.norm = "layer";
    c.embedding_norm = true;
    c.mlp = "channel_mix";
    c.tie_word_embeddings = false;
    c.rwkv7.head_dim = 6;
  };
  EXPECT_EQ(exported("kda", rwkv7), "rwkv7");
  for (const int64_t rank : {0, 3}) {
    const auto mamba3 = [&](ModelConfig& c) {
      c.layers = {"mamba3"};
      c.mlp = "none";
      c.mamba3.head_dim = 6;
      c.mamba3.mimo_rank = rank;
      c.mamba3.output_norm = rank > 0;
      c.mamba3.decay_activation = rank > 0 ? "heavy_tail" : "softplus";
    };
    EXPECT_EQ(exported("kda", mamba3), "mamba3");
    ModelConfig turned = small_config("kda");
    mamba3(turned);
    turned.mamba3.rotation = rank > 0 ? "pairs" : "halves";  // as FLA's kernels do not
    EXPECT_NE(error_of([&] { config_to_hf(turned); }).find("mixer.mamba3.rotation"), std::string::npos) << rank;
  }
  ModelConfig rms = small_config("kda");
  rwkv7(rms);
  rms.norm = "rms";
  EXPECT_NE(error_of([&] { config_to_hf(rms); }).find("norm = \"layer\" (here \"rms\")"), std::string::npos);
  ModelConfig both = small_config("gated_deltanet");
  both.layers = {"attention", "window"};  // a list of attn names each kind
  EXPECT_EQ(config_to_hf(both)["attn"].size(), 2U);
  EXPECT_EQ(config_from_hf(config_to_hf(both), "here").layers, both.layers);
  ModelConfig none = small_config("gated_deltanet");
  none.layers = {"recurrent", "conv"};
  EXPECT_NE(error_of([&] { config_to_hf(none); }), "");
  ModelConfig unscaled = small_config("gated_deltanet");
  unscaled.mlp = "none";
  EXPECT_NE(error_of([&] { config_to_hf(unscaled); }), "");
  ModelConfig turned = small_config("gated_deltanet");
  turned.layers = {"recurrent", "window"};
  turned.window.rope_fraction = 0.5;
  turned.window.head_dim = 8;
  EXPECT_NE(error_of([&] { config_to_hf(turned); }).find("mixer.window"), std::string::npos);

  const std::string words = error_of([] { config_to_hf(small_config("gated_deltanet2")); });
  EXPECT_NE(words.find("nearest is gdn2"), std::string::npos) << words;
  EXPECT_NE(words.find("decay_rank = 8 (here 0)"), std::string::npos) << words;
  EXPECT_NE(error_of([] { config_to_hf(small_config("kaczmarz")); }).find("no model that computes this"),
            std::string::npos);
}

// Every named rule: a model that is laid out for it goes out and comes back with the same logits, or the refusal names
// the nearest type.
TEST(HfConfig, LayoutMakesEveryRuleExportableThatFlaHas) {
  const std::map<std::string, std::string> exportable = {{"linear_attention", "linear_attn"},
                                                         {"retnet", "retnet"},
                                                         {"gla", "gla"},
                                                         {"deltanet", "delta_net"},
                                                         {"deltanet_neg", "delta_net"},
                                                         {"gated_deltanet", "gated_deltanet"},
                                                         {"gated_deltanet_neg", "gated_deltanet"},
                                                         {"kda", "kda"},
                                                         {"kda_neg", "kda"},
                                                         {"gated_deltanet2", "gdn2"},
                                                         {"gated_deltanet2_neg", "gdn2"},
                                                         {"precond_gated_deltanet", "precond_gated_deltanet"},
                                                         {"precond_kda", "precond_kda"},
                                                         {"hgrn2", "hgrn2"}};
  for (const Preset& preset : presets()) {
    const std::string name(preset.name);
    SCOPED_TRACE(name);
    ModelConfig wanted = small_config(name);
    // its lower bounds are as wide as the model
    if (name == "hgrn2") wanted.hidden_size = wanted.num_heads * wanted.head_dim;
    const auto type = exportable.find(name);
    if (type == exportable.end()) {
      const std::string words = error_of([&] { hf_layout(wanted, {}); });
      EXPECT_NE(words.find("no layer that computes the rule '" + name + "'; its nearest is "), std::string::npos)
          << words;
      continue;
    }
    const HfLayout layout =
        hf_layout(wanted, {"rule", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "vocab_size"});
    EXPECT_EQ(layout.type, type->second);
    EXPECT_EQ(layout.config.rule, name);
    EXPECT_EQ(hf_layout(layout.config, {}).config, layout.config);  // it is one already
    EXPECT_TRUE(hf_layout(layout.config, {}).changes.empty());
    TempFolder theirs;
    LanguageModel<float> model = noisy_model<float>(layout.config);
    export_model(theirs.path(), model);
    LanguageModel<float> back = load_model<float>(theirs.path());
    const std::vector<int32_t> ids = random_ids(20, wanted.vocab_size, 1);
    Logits<float> before(20, wanted.vocab_size), after(20, wanted.vocab_size);
    model.forward_all(ids, SeqLayout({0, 20}), nullptr, before.mat());
    back.forward_all(ids, SeqLayout({0, 20}), nullptr, after.mat());
    EXPECT_EQ(after.values, before.values);
  }
}

TEST(HfConfig, LayoutSaysWhatItChangesAndDoesNotChangeWhatWasSaid) {
  const HfLayout layout = hf_layout(small_config("gated_deltanet2"), {});
  EXPECT_NE(std::find(layout.changes.begin(), layout.changes.end(), "decay_rank = 8 (else 0)"), layout.changes.end());
  const std::string words = error_of([] { hf_layout(small_config("gated_deltanet2"), {"decay_rank"}); });
  EXPECT_EQ(
      words,
      "layout fla: gdn2 wants decay_rank = 8, but 0 was given: leave decay_rank out, or train without the layout");
  const std::string comba = error_of([] { hf_layout(small_config("comba"), {}); });
  EXPECT_NE(comba.find("nearest is comba"), std::string::npos) << comba;
  const std::string exported = error_of([] { config_to_hf(small_config("comba")); });
  EXPECT_NE(exported.find("nearest is comba"), std::string::npos) << exported;
  ModelConfig grouped = small_config("gla");
  grouped.num_v_heads = 4;
  EXPECT_NE(error_of([&] { hf_layout(grouped, {"num_v_heads"}); }), "");
}

TEST(HfConfig, AChangedConfigurationIsNotExportedAsItWas) {
  ModelConfig c = config_from_hf(gated_config(), "here");
  c.allow_neg_eigval = true;
  const std::string words = error_of([&] { config_to_hf(c); });
  EXPECT_NE(words.find("peer.config no longer says"), std::string::npos) << words;
  c.hf = "{\"config\": 3}";
  EXPECT_NE(error_of([&] { config_to_hf(c); }), "");
  c.hf.clear();
  EXPECT_EQ(config_to_hf(c)["allow_neg_eigval"], true);
}

// Half-precision tensors and dimensions of one come back as they were, until training makes them something else.
TEST(HfConfig, OtherTypesAndShapesComeBack) {
  TempFolder source, ours, theirs;
  LanguageModel<float> model(config_from_hf(gated_config(), "here"));
  Random random(2);
  model.init(random);
  write_file_atomic(source.path("config.json"), gated_config().dump());
  SafetensorsWriter writer;
  std::vector<std::vector<uint16_t>> words;
  words.reserve(model.params().specs().size());
  for (const ParamSpec& spec : model.params().specs()) {
    const std::span<float> values =
        model.params().values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size()));
    if (spec.name.ends_with("A_log")) {
      writer.add<float>(spec.name, {1, 1, spec.size(), 1}, std::span<const float>(values));
      continue;
    }
    words.emplace_back();
    const bool f16 = spec.name.ends_with("norm.weight");
    // 1, smallest, -0, ...
    const std::vector<uint16_t> some = {0x3c00, 0x0001, 0x8000, 0x03ff, 0x7bff, 0xb555, 0x0400};
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[i], sizeof(bits));
      words.back().push_back(f16 ? some[i % some.size()] : static_cast<uint16_t>(bits >> 16));
    }
    writer.add(spec.name, f16 ? "F16" : "BF16", spec.shape, std::as_bytes(std::span(words.back())));
  }
  writer.write(source.path("model.safetensors"));

  save_model(ours.path(), load_model<float>(source.path()));
  LanguageModel<float> imported = load_model<float>(ours.path());
  export_model(theirs.path(), imported);
  expect_same_tensors(source.path("model.safetensors"), theirs.path("model.safetensors"));
  EXPECT_EQ(read_json(theirs.path("config.json")), gated_config());

  imported.params().values()[0] = 0.1F;  // no bf16
  export_model(theirs.path(), imported);
  const SafetensorsReader trained(theirs.path("model.safetensors"));
  EXPECT_EQ(trained.tensors().at(imported.params().specs()[0].name).dtype, "F32");
  EXPECT_EQ(load_model<float>(theirs.path()).params().value(0)[0], 0.1F);
}

}  // namespace
}  // namespace fw::testing
