#include "model/sizes.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/nearest.h"
#include "model/config.h"
#include "model/interop/hf_config.h"
#include "rule/rule.h"

namespace fw {
namespace {

// Parameters with a vocabulary of 32,000 are in tests/model/sizes_test.cpp. Where a paper does not give its layers,
// they are those with which the count is the paper's.
constexpr const char *kPreconditioned = "Preconditioned DeltaNet", *kKaczmarz = "Kaczmarz Linear Attention",
                     *kGdn2 = "Gated DeltaNet-2";
constexpr SizeKind kAll = SizeKind::kAll, kChannelDecay = SizeKind::kChannelDecay,
                   kChannelGates = SizeKind::kChannelGates;
constexpr NamedSize kSizes[] = {
    // name, paper, rules, layers, hidden, heads, head dimension, MLP, tied, gate, its rank, rank of a channel decay,
    // windows
    {"340m", kPreconditioned, kAll, 24, 1024, 8, 128, 2816, true, "none", 0, 0, false},
    {"340m", kPreconditioned, kChannelDecay, 24, 1024, 8, 128, 2816, true, "sigmoid", 128, 128, false},
    {"400m", kKaczmarz, kAll, 24, 1024, 8, 128, 2816, false, "silu", 0, 0, false},
    {"400m", kKaczmarz, kChannelDecay, 24, 1024, 8, 128, 2816, false, "silu", 0, 128, false},
    {"1b", kPreconditioned, kAll, 24, 1792, 14, 128, 4864, true, "none", 0, 0, false},
    {"1b", kPreconditioned, kChannelDecay, 24, 1792, 14, 120, 4864, true, "sigmoid", 120, 120, false},
    // Gated DeltaNet-2 compares models of one state and 1.3B parameters: the MLP makes up for the mixer.
    {"1.3b", kGdn2, kAll, 20, 2048, 16, 128, 6080, false, "silu", 0, 0, false},
    {"1.3b", kGdn2, kChannelDecay, 20, 2048, 16, 128, 6592, false, "sigmoid", 128, 128, false},
    {"1.3b", kGdn2, kChannelGates, 20, 2048, 16, 128, 4032, false, "silu", 0, 0, false},
    {"1.3b-hybrid", kGdn2, kAll, 20, 2048, 16, 128, 6464, false, "silu", 0, 0, true},
    {"1.3b-hybrid", kGdn2, kChannelDecay, 20, 2048, 16, 128, 6720, false, "sigmoid", 128, 128, true},
    {"1.3b-hybrid", kGdn2, kChannelGates, 20, 2048, 16, 128, 5440, false, "silu", 0, 0, true},
};

// Released hybrids: what their configurations (transformers) have that is not the type's default.
struct ReleasedSize {
  const char *name, *config;
};
constexpr ReleasedSize kReleased[] = {
    {"qwen3.5-0.8b", R"({"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584,
      "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
      "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-2b", R"({"model_type": "qwen3_5_text", "hidden_size": 2048, "intermediate_size": 6144,
      "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
      "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-4b", R"({"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216,
      "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
      "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-9b", R"({"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
      "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
      "tie_word_embeddings": false, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-27b", R"({"model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
      "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
      "tie_word_embeddings": false, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-35b-a3b", R"({"model_type": "qwen3_5_moe_text", "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3.5-122b-a10b", R"({"model_type": "qwen3_5_moe_text", "hidden_size": 3072, "num_hidden_layers": 48,
      "num_attention_heads": 32, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
      "shared_expert_intermediate_size": 1024, "rope_parameters": {"rope_theta": 1e7}})"},
    {"qwen3-next-80b-a3b", R"({"model_type": "qwen3_next", "rope_parameters": {"rope_theta": 1e7}})"},
    {"kimi-linear-48b-a3b", R"({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 32, "head_dim": 128,
      "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}})"},
    {"olmo-hybrid-7b", R"({"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": null}})"},
};

// All keys of the released model, the rule and the vocabulary among them.
nlohmann::json released_keys(const ReleasedSize& size) {
  ModelConfig config = config_from_hf(nlohmann::json::parse(size.config), size.name);
  config.hf.clear();
  nlohmann::json keys = config_to_json(config);
  keys.erase("model_type");
  return keys;
}

SizeKind kind_of(const Rule& rule) {
  if (rule.decay != Decay::kChannel) return kAll;
  return rule.uses_erase_gate() ? kChannelGates : kChannelDecay;
}

}  // namespace

std::span<const NamedSize> named_sizes() { return kSizes; }

std::vector<std::string> size_names() {
  std::vector<std::string> names;
  for (const NamedSize& size : kSizes) {
    if (size.kind == kAll) names.emplace_back(size.name);
  }
  for (const ReleasedSize& size : kReleased) names.emplace_back(size.name);
  return names;
}

nlohmann::json size_keys(const std::string& name, const std::string& rule) {
  for (const ReleasedSize& size : kReleased) {
    if (name == size.name) return released_keys(size);
  }
  const SizeKind kind = kind_of(parse_rule(rule));
  const NamedSize* found = nullptr;
  for (const NamedSize& size : kSizes) {
    if (name == size.name && size.kind <= kind) found = &size;  // the last: kinds ascend
  }
  if (found != nullptr) {
    nlohmann::json keys = {{"num_hidden_layers", found->layers},
                           {"hidden_size", found->hidden},
                           {"num_heads", found->heads},
                           {"head_dim", found->head_dim},
                           {"output_gate", found->output_gate},
                           {"output_gate_rank", found->output_gate_rank},
                           {"intermediate_size", found->intermediate},
                           {"tie_word_embeddings", found->tied}};
    if (found->kind != kAll) keys["decay_rank"] = found->decay_rank;
    // a window of 2,048 with the model's heads, as a window is
    if (found->hybrid) keys["layers"] = {"recurrent", "window"};
    return keys;
  }
  const std::vector<std::string> names = size_names();
  const std::string near = nearest(name, names);
  fail_usage("size: expected one of {}, got '{}'{}", fmt::join(names, ", "), name,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace fw
