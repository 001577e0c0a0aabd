// Every key of another program's configuration: it changes the model here, or it is known to change no number, or it is
// an error.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/temp_folder.h"
#include "model/hf_configs.h"
#include "model/interop/hf_config.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

// Written from the programs' sources and not from the reader's own lists.
const std::set<std::string>& without_effect() {
  static const std::set<std::string> keys = {
      // kernels, caches, what a call returns, where the file is from
      "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_cache",
      "max_position_embeddings", "chunk_size", "transformers_version", "architectures", "dtype", "use_mambapy",
      "use_associative_scan", "residual_in_fp32",
      // ids of tokens
      "pad_token_id", "bos_token_id", "eos_token_id",
      // first values and the loss in training
      "initializer_range", "use_l2warp", "rescale_prenorm_residual", "dt_min", "dt_max", "dt_init_floor", "dt_scale",
      "dt_init_scheme", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme",
      "A_init_range", "conv_init", "log_atk_scale_init", "a_log_init_lower", "correction_factor"};
  return keys;
}
// Keys that say something only beside a value of another key that the configuration does not have.
const std::set<std::pair<std::string, std::string>> kOfOthers = {{"gla", "conv_size"},
                                                                 {"retnet", "conv_size"},
                                                                 // of a convolution that is off
                                                                 {"hgrn2", "conv_size"},
                                                                 // of is_mimo
                                                                 {"mamba3", "mimo_rank"},
                                                                 // Mamba-2 has a time step a head
                                                                 {"transformers mamba2", "time_step_rank"},
                                                                 {"mesa_net", "max_cg_step_training"},
                                                                 // more steps than the default end at the exact solve
                                                                 {"mesa_net", "max_cg_step_decoding"}};

std::vector<Json> others(const std::string& key, const Json& value) {
  // the width that it makes is rounded up to a multiple of 256
  if (key == "hidden_ratio") return {value.get<int64_t>() * 4, "other"};
  if (value.is_boolean()) return {!value.get<bool>()};
  if (value.is_number_integer()) return {value.get<int64_t>() * 2 + (value == 0 ? 2 : 0), value.get<int64_t>() + 1};
  if (value.is_number()) return {value.get<double>() * 1.5 + 0.125};
  if (value.is_string()) return {"other", 3};
  if (value.is_array()) return {Json::array({7})};
  if (value.is_object())
    return {Json{{"layers", Json::array({0})}, {"num_heads", 2}},
            Json{{"layers", Json::array({1})}, {"num_heads", 2}, {"softcap", 30.0}}};
  return {3, true, "other"};
}

Json meaning(const ModelConfig& config) {
  Json json = config_to_json(config);
  json.erase("peer");
  return json;
}

TEST(HfKeys, EachChangesTheModelOrIsKnownToChangeNothingOrIsAnError) {
  const Json all = Json::parse(kHfConfigs);
  int used = 0, refused = 0, without = 0;
  for (const auto& [type, config] : all.items()) {
    StringList warnings;
    const ModelConfig plain = config_from_hf(config, "config", &warnings);
    EXPECT_TRUE(warnings.empty()) << type << ": " << warnings.front();
    for (const auto& [key, value] : config.items()) {
      if (key == "model_type") continue;
      for (const Json& other : others(key, value)) {
        SCOPED_TRACE(type + ": " + key + " = " + other.dump());
        Json changed = config;
        changed[key] = other;
        ModelConfig read;
        const std::string words = error_of([&] { read = config_from_hf(changed, "config"); });
        if (!words.empty()) {
          EXPECT_EQ(words.rfind("config: ", 0), 0U) << words;
          ++refused;
        } else if (meaning(read) != meaning(plain)) {
          ++used;
        } else {
          ++without;
          // swish and silu, sqrelu and relu2 are one function: "other" is neither.
          EXPECT_TRUE(without_effect().count(key) != 0 || kOfOthers.count({type, key}) != 0) << "changes nothing";
        }
      }
    }
  }
  RecordProperty("used", used);
  RecordProperty("refused", refused);
  RecordProperty("without_effect", without);
  EXPECT_GT(used, 200);
  EXPECT_GT(refused, 100);
  EXPECT_GT(without, 100);
}

TEST(HfKeys, AnUnknownKeyWithNumbersIsAnErrorAndATextAWarning) {
  const Json all = Json::parse(kHfConfigs);
  for (const auto& [type, config] : all.items()) {
    for (const Json& value : {Json(2), Json(0.5), Json(true), Json::array({1}), Json{{"a", {{"b", 1}}}}}) {
      for (const char* key : {"scale_of_nothing", "logit_scale", "rope_scaling"}) {
        Json changed = config;
        changed[key] = value;
        const std::string words = error_of([&] { config_from_hf(changed, "config"); });
        EXPECT_NE(words.find(key), std::string::npos) << type << ": " << words;
      }
    }
    for (const Json& value : {Json("text"), Json::array({"a"}), Json::object()}) {
      Json changed = config;
      changed["scale_of_nothing"] = value;
      StringList warnings;
      EXPECT_EQ(meaning(config_from_hf(changed, "config", &warnings)), meaning(config_from_hf(config, "config")));
      ASSERT_EQ(warnings.size(), 1U) << type;
      EXPECT_NE(warnings[0].find("scale_of_nothing"), std::string::npos);
    }
    Json changed = config;
    changed["scale_of_nothing"] = nullptr;
    changed["logit_scale"] = 1.0;  // asks for nothing
    EXPECT_EQ(error_of([&] { config_from_hf(changed, "config"); }), "") << type;
  }
}

Json config_of(const char* name) { return Json::parse(kHfConfigs).at(name); }

TEST(HfKeys, TwoNamesOfOneKeyMustSayTheSame) {
  Json json = config_of("transformers mamba2");
  json["layer_norm_epsilon"] = 0.05;
  EXPECT_EQ(config_from_hf(json, "c").norm_eps, 0.05);
  json["norm_eps"] = 0.05;
  EXPECT_EQ(config_from_hf(json, "c").norm_eps, 0.05);
  json["norm_eps"] = 0.01;
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("layer_norm_epsilon: expected 0.01 as norm_eps says"),
            std::string::npos);

  Json mamba = config_of("transformers mamba");
  mamba["time_step_rank"] = 3;
  EXPECT_EQ(config_from_hf(mamba, "c").mamba.dt_rank, 3);
  mamba["time_step_rank"] = "auto";
  EXPECT_EQ(config_from_hf(mamba, "c").mamba.dt_rank, 4);
  mamba["dt_rank"] = 5;
  EXPECT_NE(error_of([&] { config_from_hf(mamba, "c"); }).find("time_step_rank: expected 5"), std::string::npos);
  mamba.erase("dt_rank");
  mamba["intermediate_size"] = 100;
  EXPECT_NE(error_of([&] {
              config_from_hf(mamba, "c");
            }).find("intermediate_size: expected expand * hidden_size = 128, got 100"),
            std::string::npos);
}

// Both programs have a model_type mamba and mamba2; what they leave out has other defaults.
TEST(HfKeys, DefaultsAreThoseOfTheProgramThatWroteIt) {
  Json theirs = config_of("transformers mamba");
  theirs.erase("tie_word_embeddings");  // true, which older versions did not write
  EXPECT_TRUE(config_from_hf(theirs, "c").tie_word_embeddings);
  Json fla = config_of("mamba");
  fla.erase("tie_word_embeddings");
  EXPECT_FALSE(config_from_hf(fla, "c").tie_word_embeddings);
  Json both = theirs;
  both["norm_eps"] = both["layer_norm_epsilon"];
  EXPECT_NE(error_of([&] { config_from_hf(both, "c"); }).find("tie_word_embeddings: expected a value"),
            std::string::npos);
}

// As published models have them: keys that converters left over.
TEST(HfKeys, PublishedConfigurationsOfTransformers) {
  const Json mamba = {{"architectures", {"MambaForCausalLM"}},
                      {"bos_token_id", 0},
                      {"conv_kernel", 4},
                      {"d_inner", 128},
                      {"d_model", 64},
                      {"eos_token_id", 0},
                      {"expand", 2},
                      {"fused_add_norm", true},
                      {"hidden_act", "silu"},
                      {"hidden_size", 64},
                      {"initializer_range", 0.1},
                      {"intermediate_size", 128},
                      {"layer_norm_epsilon", 1e-05},
                      {"model_type", "mamba"},
                      {"n_layer", 2},
                      {"num_hidden_layers", 2},
                      {"pad_token_id", 0},
                      {"pad_vocab_size_multiple", 8},
                      {"rescale_prenorm_residual", false},
                      {"residual_in_fp32", true},
                      {"rms_norm", true},
                      {"ssm_cfg", Json::object()},
                      {"state_size", 16},
                      {"time_step_floor", 0.0001},
                      {"time_step_init_scheme", "random"},
                      {"time_step_max", 0.1},
                      {"time_step_min", 0.001},
                      {"time_step_rank", 4},
                      {"time_step_scale", 1.0},
                      {"torch_dtype", "float32"},
                      {"transformers_version", "4.39.0.dev0"},
                      {"use_bias", false},
                      {"use_cache", true},
                      {"use_conv_bias", true},
                      {"vocab_size", 56}};
  StringList warnings;
  const ModelConfig c = config_from_hf(mamba, "c", &warnings);
  EXPECT_TRUE(warnings.empty());
  EXPECT_TRUE(c.tie_word_embeddings);
  EXPECT_EQ(c.mamba.dt_rank, 4);
  Json wrong = mamba;
  wrong["n_layer"] = 3;
  EXPECT_NE(error_of([&] { config_from_hf(wrong, "c"); }).find("n_layer: expected 2 as num_hidden_layers says"),
            std::string::npos);

  Json mamba2 = config_of("transformers mamba2");
  mamba2.update({{"norm_before_gate", true},
                 {"rms_norm", true},
                 {"intermediate_size", 128},
                 {"time_step_scale", 1.0},
                 {"time_step_init_scheme", "random"}});
  EXPECT_EQ(meaning(config_from_hf(mamba2, "c")), meaning(config_from_hf(config_of("transformers mamba2"), "c")));
  Json fla = config_of("mamba2");
  fla["norm_before_gate"] = true;
  EXPECT_NE(error_of([&] { config_from_hf(fla, "c"); }).find("norm_before_gate"), std::string::npos);
}

TEST(HfKeys, TheLimitOfTimeSteps) {
  for (const char* key : {"time_step_limit", "dt_limit"}) {
    Json json = config_of("transformers mamba2");
    json[key] = Json::array({0.0, {{"__float__", "Infinity"}}});
    EXPECT_EQ(error_of([&] { config_from_hf(json, "c"); }), "") << key;
    json[key] = Json::array({0.0, 0.5});
    EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find(std::string(key) + ": expected 0 to infinity"),
              std::string::npos)
        << key;
  }
}

TEST(HfKeys, RotaryParameters) {
  Json json = config_of("transformer");
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500.0}};
  EXPECT_EQ(config_from_hf(json, "c").attention.rope_theta, 500);
  json["rope_theta"] = 1000.0;
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("rope_parameters: rope_theta: expected 1000"),
            std::string::npos);
  json["rope_theta"] = 500.0;
  EXPECT_EQ(error_of([&] { config_from_hf(json, "c"); }), "");
  json["rope_parameters"]["partial_rotary_factor"] = 0.5;
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("partial_rotary_factor"), std::string::npos);
  json["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("rope_type"), std::string::npos);
  json["rope_parameters"] = {{"factor", 4.0}};
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("rope_parameters: factor: this key is not known"),
            std::string::npos);
}

TEST(HfKeys, AttentionAsAList) {
  Json json = config_of("gated_deltanet");
  json["num_hidden_layers"] = 4;
  json["attn"] =
      Json::array({{{"layers", {1}}, {"num_heads", 4}, {"window_size", 16}}, {{"layers", {3}}, {"num_heads", 2}}});
  const ModelConfig c = config_from_hf(json, "c");
  EXPECT_EQ(c.layers, (StringList{"recurrent", "window", "recurrent", "attention"}));
  EXPECT_EQ(c.window.num_heads, 4);
  EXPECT_EQ(c.attention.num_heads, 2);
  ModelConfig own = c;
  own.hf.clear();
  const Json written = config_to_hf(own);
  EXPECT_EQ(written["attn"].size(), 2U) << written;
  EXPECT_EQ(config_from_hf(written, "c").layers, c.layers);

  json["attn"] = Json::array({json["attn"][0], {{"layers", {3}}, {"num_heads", 4}, {"window_size", 16}}});
  EXPECT_EQ(config_from_hf(json, "c").layers, (StringList{"recurrent", "window"}));
  json["attn"][1]["window_size"] = 32;
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("attn[1]: expected the same keys"), std::string::npos);
  json["attn"][1] = {{"layers", {1}}, {"num_heads", 4}};
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("attn[1]: layers: expected every number once, got 1"),
            std::string::npos);
  json["attn"] = Json::array({3});
  EXPECT_NE(error_of([&] { config_from_hf(json, "c"); }).find("attn: expected an object"), std::string::npos);
  json["attn"] = Json::array();
  EXPECT_TRUE(config_from_hf(json, "c").layers.empty());

  Json mesa = config_of("mesa_net");
  mesa["attn"] = {{"layers", {1}}, {"num_heads", 4}};
  EXPECT_EQ(config_from_hf(mesa, "c").layers, (StringList{"mesa", "attention"}));
}

TEST(HfKeys, TheOutputGateOfGatedDeltaNet) {
  Json json = config_of("gated_deltanet");
  EXPECT_EQ(config_from_hf(json, "c").output_gate, "silu");
  json["output_gate_activation"] = "sigmoid";
  ModelConfig c = config_from_hf(json, "c");
  EXPECT_EQ(c.output_gate, "sigmoid");
  c.hf.clear();
  EXPECT_EQ(config_to_hf(c)["output_gate_activation"], "sigmoid");
}

}  // namespace
}  // namespace fw::testing
