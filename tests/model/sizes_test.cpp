// Sizes by name have the number of parameters that the papers' models have (vocabulary of 32,000). recipes_test.cpp
// names the sections.
#include "model/sizes.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "model/config.h"

namespace fw {
namespace {

double parameters(const std::string& size, const std::string& rule) {
  ModelConfig config;
  config.rule = rule;
  config.vocab_size = 32000;
  keys_from_json(key_tables(config), size_keys(size, rule), size, {});
  validate(config);
  return parameter_count(config);
}

TEST(Sizes, HaveThePapersNumberOfParameters) {
  EXPECT_NEAR(parameters("340m", "deltanet") / 1e6, 341.6, 0.05);
  EXPECT_NEAR(parameters("340m", "gated_deltanet") / 1e6, 341.8, 0.05);
  EXPECT_NEAR(parameters("340m", "precond_gated_deltanet") / 1e6, 342.2, 0.05);
  EXPECT_NEAR(parameters("340m", "kda") / 1e6, 354.2, 0.05);
  EXPECT_NEAR(parameters("400m", "kaczmarz") / 1e6, 399.7, 0.05);
  EXPECT_NEAR(parameters("1b", "gated_deltanet") / 1e6, 995.0, 0.05);
  EXPECT_NEAR(parameters("1b", "precond_gated_deltanet") / 1e6, 996.2, 0.05);
  EXPECT_NEAR(parameters("1b", "kda") / 1e6, 995.2, 0.05);
  EXPECT_NEAR(parameters("1b", "precond_kda") / 1e6, 996.4, 0.05);
  for (const char* size : {"1.3b", "1.3b-hybrid"}) {
    for (const char* rule : {"gated_deltanet", "kda", "gated_deltanet2", "gated_deltanet2_neg"}) {
      EXPECT_NEAR(parameters(size, rule) / 1e9, 1.3, 0.004) << size << " " << rule;
    }
  }
}

TEST(Sizes, AHybridsWindowsAreThePapers) {
  ModelConfig config;
  config.rule = "kda";
  keys_from_json(key_tables(config), size_keys("1.3b-hybrid", "kda"), "size", {});
  EXPECT_EQ(config.layer_kind(18), LayerKind::kRecurrent);
  EXPECT_EQ(config.layer_kind(19), LayerKind::kWindow);
  const auto spec = std::get<AttentionSpec>(config.layer_spec(19));
  EXPECT_EQ(spec.window, 2048);
  EXPECT_EQ(spec.heads, 16);
  EXPECT_EQ(spec.kv_heads, 16);
  EXPECT_EQ(spec.head_dim, 128);
}

// As transformers counts them, head and embedding once where they are tied, and Kimi's correction biases with them.
TEST(Sizes, ReleasedHybridsHaveTheirNumberOfParameters) {
  const auto count = [](const char* name) {
    ModelConfig config;
    keys_from_json(key_tables(config), size_keys(name, config.rule), name, {});
    validate(config);
    return static_cast<int64_t>(parameter_count(config));
  };
  EXPECT_EQ(count("qwen3.5-0.8b"), 752393024);
  EXPECT_EQ(count("qwen3.5-2b"), 1881825088);
  EXPECT_EQ(count("qwen3.5-4b"), 4205751296);
  EXPECT_EQ(count("qwen3.5-9b"), 8953803264);
  EXPECT_EQ(count("qwen3.5-27b"), 26895998464);
  EXPECT_EQ(count("qwen3.5-35b-a3b"), 34660610688);
  EXPECT_EQ(count("qwen3.5-122b-a10b"), 122111526912);
  EXPECT_EQ(count("qwen3-next-80b-a3b"), 79674391296);
  EXPECT_EQ(count("kimi-linear-48b-a3b"), 49122681728);
  EXPECT_EQ(count("olmo-hybrid-7b"), 7430870688);
}

// Every size is one of every rule, and neither the rule nor the vocabulary is the size's.
TEST(Sizes, AreThoseOfEveryRule) {
  for (const NamedSize& size : named_sizes()) {
    for (const Preset& preset : presets()) {
      SCOPED_TRACE(std::string(size.name) + " " + std::string(preset.name));
      EXPECT_GT(parameters(size.name, std::string(preset.name)), 3e8);
      EXPECT_FALSE(size_keys(size.name, std::string(preset.name)).contains("rule"));
      EXPECT_FALSE(size_keys(size.name, std::string(preset.name)).contains("vocab_size"));
    }
  }
}

TEST(Sizes, AnUnknownOneIsAnErrorWithTheNearest) {
  try {
    size_keys("1.3", "kda");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "size: expected one of 340m, 400m, 1b, 1.3b, 1.3b-hybrid, qwen3.5-0.8b, qwen3.5-2b, "
                 "qwen3.5-4b, qwen3.5-9b, qwen3.5-27b, qwen3.5-35b-a3b, qwen3.5-122b-a10b, qwen3-next-80b-a3b, "
                 "kimi-linear-48b-a3b, olmo-hybrid-7b, got '1.3'; did you mean '1.3b'?");
  }
}

}  // namespace
}  // namespace fw
