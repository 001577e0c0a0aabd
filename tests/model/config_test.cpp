// The configuration: what cannot be is an error that names the key, what was expected and what came.
#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

std::string json_error(const Json& json) {
  return error_of([&] { config_from_json(json, "'run/config.json'"); });
}

TEST(ModelConfig, DefaultsAreValid) {
  const ModelConfig config;
  validate(config);
  EXPECT_EQ(config.mlp_size(), 512);
  EXPECT_EQ(config.head_v_dim(), 64);
  EXPECT_EQ(config.v_heads(), 3);
  EXPECT_TRUE(config.resolved_rule() == preset("gated_deltanet2").rule);
}

TEST(ModelConfig, MlpSizeIsRoundedUp) {
  ModelConfig config;
  config.hidden_size = 1024;
  EXPECT_EQ(config.mlp_size(), 2816);  // 2730.67 up to a multiple of 256
  config.hidden_size = 100;
  EXPECT_EQ(config.mlp_size(), 320);  // 266.67 up to a multiple of 64
  config.intermediate_size = 77;
  EXPECT_EQ(config.mlp_size(), 77);
}

TEST(ModelConfig, JsonGoesBothWays) {
  ModelConfig config;
  config.rule = "kda";
  config.vocab_size = 1000;
  config.num_v_heads = 6;
  config.expand_v = 0.5;
  config.norm_eps = 1e-6;
  config.tie_word_embeddings = false;
  config.allow_neg_eigval = true;
  config.output_gate = "sigmoid";
  config.output_gate_rank = 8;
  config.decay_rank = 16;
  config.decay_per_value_head = true;
  config.init = "normal";
  config.precond_x = 1.25;
  const Json json = config_to_json(config);
  EXPECT_EQ(config_to_json(config_from_json(Json::parse(json.dump()), "text")), json);
  EXPECT_EQ(json.at("model_type"), "fastweight");
  // keys may be left out
  EXPECT_EQ(config_to_json(config_from_json(Json::object(), "text")), config_to_json(ModelConfig{}));
}

TEST(ModelConfig, EveryPresetIsAConfiguration) {
  for (const Preset& p : presets()) {
    ModelConfig config;
    config.rule = std::string(p.name);
    EXPECT_NO_THROW(validate(config)) << p.name;
  }
}

TEST(ModelConfig, NegativeEigenvaluesDoubleTheErasingGate) {
  ModelConfig config;
  config.allow_neg_eigval = true;
  config.rule = "gated_deltanet2";
  EXPECT_EQ(config.resolved_rule().gain_bound, 2.0);
  EXPECT_TRUE(config.mixer_spec().erase_doubles());
  EXPECT_FALSE(config.mixer_spec().gain_doubles());
  config.rule = "gated_deltanet";
  EXPECT_TRUE(config.mixer_spec().gain_doubles());
  config.rule = "kda erase=channel";  // the gain is on the write only
  EXPECT_TRUE(config.mixer_spec().erase_doubles());
  EXPECT_FALSE(config.mixer_spec().gain_doubles());
}

struct Bad {
  std::string name;
  std::function<void(ModelConfig&)> change;
  std::vector<std::string> words;  // all in the message
};

TEST(ModelConfig, WhatCannotBeIsAnError) {
  const std::vector<Bad> cases = {
      {"heads", [](ModelConfig& c) { c.num_v_heads = 4; }, {"num_v_heads", "multiple of num_heads = 3", "4"}},
      {"no heads", [](ModelConfig& c) { c.num_heads = 0; }, {"num_heads", "0"}},
      {"negative width", [](ModelConfig& c) { c.hidden_size = -192; }, {"hidden_size", "-192"}},
      {"no vocabulary", [](ModelConfig& c) { c.vocab_size = 0; }, {"vocab_size", "0"}},
      {"no layers", [](ModelConfig& c) { c.num_hidden_layers = 0; }, {"num_hidden_layers", "0"}},
      {"head_dim", [](ModelConfig& c) { c.head_dim = -1; }, {"head_dim", "-1"}},
      {"expand_v", [](ModelConfig& c) { c.expand_v = 1.01; }, {"expand_v", "1.01"}},
      {"expand_v nan", [](ModelConfig& c) { c.expand_v = std::nan(""); }, {"expand_v", "nan"}},
      {"negative expand_v", [](ModelConfig& c) { c.expand_v = -1; }, {"expand_v", "-1"}},
      {"conv_size", [](ModelConfig& c) { c.conv_size = -4; }, {"conv_size", "-4"}},
      {"intermediate_size", [](ModelConfig& c) { c.intermediate_size = -1; }, {"intermediate_size", "-1"}},
      {"hidden_ratio", [](ModelConfig& c) { c.hidden_ratio = 0; }, {"hidden_ratio", "0"}},
      {"norm_eps", [](ModelConfig& c) { c.norm_eps = -1e-5; }, {"norm_eps", "-1e-05"}},
      {"output_gate",
       [](ModelConfig& c) { c.output_gate = "sigmoit"; },
       {"output_gate", "silu, sigmoid or none", "sigmoit", "did you mean 'sigmoid'"}},
      {"init", [](ModelConfig& c) { c.init = "xavir"; }, {"init", "xavier", "xavir"}},
      {"gate rank",
       [](ModelConfig& c) { c.output_gate = "none", c.output_gate_rank = 4; },
       {"output_gate_rank", "none"}},
      {"decay rank",
       [](ModelConfig& c) { c.rule = "gated_deltanet", c.decay_rank = 4; },
       {"decay_rank", "gated_deltanet", "4"}},
      {"decay heads",
       [](ModelConfig& c) { c.rule = "deltanet", c.decay_per_value_head = true; },
       {"decay_per_value_head", "deltanet"}},
      {"rule", [](ModelConfig& c) { c.rule = "gated_deltanet3"; }, {"gated_deltanet3", "did you mean 'gated_deltanet"}},
      {"axis", [](ModelConfig& c) { c.rule = "kda gain=ten"; }, {"gain", "ten"}},
      {"nothing to double",
       [](ModelConfig& c) { c.rule = "gla", c.allow_neg_eigval = true; },
       {"allow_neg_eigval", "gla"}},
      {"unstable",
       [](ModelConfig& c) { c.rule = "precond_gated_deltanet", c.allow_neg_eigval = true; },
       {"precond_x", "1.5", "2"}},
      {"precond_x", [](ModelConfig& c) { c.rule = "precond_gated_deltanet", c.precond_x = 2.5; }, {"precond_x", "2.5"}},
      {"gain_bound in between",
       [](ModelConfig& c) { c.rule = "kda gain_bound=1.5"; },
       {"gain_bound", "allow_neg_eigval"}},
      {"precond_x twice",
       [](ModelConfig& c) { c.rule = "precond_gated_deltanet precond_x=1.2"; },
       {"precond_x", "1.2"}},
      {"gain_source",
       [](ModelConfig& c) { c.rule = "kaczmarz", c.gain_source = "learnt"; },
       {"gain_source", "did you mean 'learned'"}},
      {"gain_source without gain",
       [](ModelConfig& c) { c.gain_source = "learned"; },
       {"gain_source", "gated_deltanet2"}},
      {"gain_factor",
       [](ModelConfig& c) { c.rule = "kaczmarz", c.gain_factor = "1/t^2"; },
       {"gain_factor", "1/sqrt(t)"}},
      {"gain_factor without gain",
       [](ModelConfig& c) { c.rule = "nlms", c.gain_factor = "1/t"; },
       {"gain_factor", "nlms"}},
      {"single gate of a channel decay",
       [](ModelConfig& c) { c.rule = "kda", c.single_gate = true; },
       {"single_gate", "kda"}},
      {"single gate above 1",
       [](ModelConfig& c) { c.rule = "gated_deltanet_neg", c.single_gate = true; },
       {"single_gate", "up to 1"}},
      {"tied gates of no preconditioner",
       [](ModelConfig& c) { c.rule = "kaczmarz", c.precond_gates = "tied"; },
       {"precond_gates", "kaczmarz"}},
      {"tied gates of a channel decay",
       [](ModelConfig& c) { c.rule = "precond_kda", c.precond_gates = "tied"; },
       {"precond_gates", "precond_kda"}},
      {"precond_center without a center",
       [](ModelConfig& c) { c.rule = "precond_exact", c.precond_center = "exp"; },
       {"precond_center", "precond_exact"}},
      {"norm of all heads without a norm",
       [](ModelConfig& c) { c.layers = {"attention"}, c.attention.qk_norm_all_heads = true; },
       {"mixer.attention.qk_norm_all_heads", "qk_norm"}},
      {"large tensor",
       [](ModelConfig& c) { c.hidden_size = 1 << 20, c.num_heads = 1 << 12, c.hidden_ratio = 0.01; },
       {"2^31", "q_proj"}},
      {"groups of experts",
       [](ModelConfig& c) { c.mlp = "experts", c.experts.groups = 3; },
       {"ffn.experts.groups", "divides the 8 experts"}},
      {"groups to choose from",
       [](ModelConfig& c) { c.mlp = "experts", c.experts.top_groups = 2; },
       {"ffn.experts.top_groups", "at most groups = 1"}},
      {"chosen experts",
       [](ModelConfig& c) { c.mlp = "experts", c.experts.groups = 4, c.experts.top_k = 3; },
       {"ffn.experts.top_k", "the 2 experts that a token chooses from"}},
      {"gate without a shared expert",
       [](ModelConfig& c) { c.mlp = "experts", c.experts.shared_gate = true; },
       {"ffn.experts.shared_gate"}},
      {"large experts",
       [](ModelConfig& c) { c.mlp = "experts", c.experts.num_experts = 65536, c.experts.intermediate_size = 1024; },
       {"2^31", "experts.gate_up_proj"}},
      {"large embedding", [](ModelConfig& c) { c.vocab_size = 1 << 30; }, {"vocab_size", "2^31"}},
      {"large model", [](ModelConfig& c) { c.hidden_size = 16384, c.num_hidden_layers = 1000; }, {"2^35"}},
  };
  for (const Bad& bad : cases) {
    ModelConfig config;
    bad.change(config);
    const std::string message = error_of([&] { validate(config); });
    EXPECT_NE(message, "") << bad.name;
    for (const std::string& word : bad.words)
      EXPECT_NE(message.find(word), std::string::npos)
          << bad.name << ": '" << message << "' does not say '" << word << "'";
  }
}

TEST(ModelConfig, JsonErrorsNameFileKeyAndValue) {
  const auto expect = [](const Json& json, std::vector<std::string> needed) {
    needed.emplace_back("run/config.json");
    const std::string message = json_error(json);
    for (const std::string& word : needed)
      EXPECT_NE(message.find(word), std::string::npos) << "'" << message << "' does not say '" << word << "'";
  };
  expect(Json::array(), {"object"});
  expect({{"hiden_size", 5}}, {"hiden_size", "did you mean 'hidden_size'"});
  expect({{"hidden_size", "192"}}, {"hidden_size", "whole number", "\"192\""});
  expect({{"hidden_size", 1.5}}, {"hidden_size", "whole number", "1.5"});
  expect({{"hidden_size", nullptr}}, {"hidden_size", "null"});
  expect({{"hidden_size", 18446744073709551615U}}, {"hidden_size", "18446744073709551615"});
  expect({{"tie_word_embeddings", 1}}, {"tie_word_embeddings", "true or false", "1"});
  expect({{"rule", 3}}, {"rule", "string", "3"});
  expect({{"expand_v", "2"}}, {"expand_v", "number"});
  expect({{"model_type", "llama"}}, {"model_type", "fastweight", "llama"});
  expect({{"num_heads", -1}}, {"num_heads", "-1"});
  expect({{"rule", "\xff\xfe"}}, {"rule"});
  EXPECT_LT(json_error({{"rule", std::vector<int>(100000, 7)}}).size(), 400U);
}

}  // namespace
}  // namespace fw::testing
