#include "model/interop/hf_experts.h"

#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "model/interop/hf_hybrids.h"
#include "model/interop/hf_parts.h"
#include "model/interop/hf_types.h"

namespace fw::hf {
namespace {

struct ExpertDefaults {
  int64_t experts, top_k, size, shared;
};

// transformers adds the loss of the balance only with output_router_logits.
double read_balance(const Keys& keys) {
  const double coefficient = keys.number("router_aux_loss_coef", 0.001);
  return keys.truth("output_router_logits", false) ? coefficient : 0;
}

void read_qwen_experts(const Keys& keys, ModelConfig& c, const ExpertDefaults& standard) {
  ExpertsKeys& e = c.experts;
  c.mlp = "experts";
  e.num_experts = keys.whole("num_experts", standard.experts);
  e.top_k = keys.whole("num_experts_per_tok", standard.top_k);
  e.intermediate_size = keys.whole("moe_intermediate_size", standard.size);
  e.shared_size = keys.whole("shared_expert_intermediate_size", standard.shared);
  for (const auto& [key, value] : {std::pair("num_experts", e.num_experts), std::pair("num_experts_per_tok", e.top_k),
                                   std::pair("moe_intermediate_size", e.intermediate_size),
                                   std::pair("shared_expert_intermediate_size", e.shared_size)})
    check_count(keys, key, value);
  e.shared_gate = true;
  e.balance = read_balance(keys);
}

void write_qwen_experts(const ModelConfig& c, Json& json) {
  const ExpertsSpec e = c.mlp_spec(c.num_hidden_layers).experts;
  json.update({{"num_experts", e.router.experts},
               {"num_experts_per_tok", e.router.chosen},
               {"moe_intermediate_size", e.size},
               {"shared_expert_intermediate_size", e.shared_size},
               {"router_aux_loss_coef", c.experts.balance},
               {"output_router_logits", c.experts.balance > 0}});
}

HfTensor in_layer_of(int64_t layer, std::string_view part) { return {fmt::format("model.layers.{}.{}", layer, part)}; }

}  // namespace

// ---- Qwen3.5 with experts

void read_qwen3_5_moe_text(const Keys& keys, ModelConfig& c) {
  read_qwen_layers(keys, c, {248320, 2048, 512, 40, 16, 2, 256});
  read_qwen_experts(keys, c, {256, 8, 512, 512});
}

void write_qwen3_5_moe_text(const ModelConfig& c, Json& json) {
  write_qwen3_5_text(c, json);
  json.erase("intermediate_size");
  json["architectures"] = {"Qwen3_5MoeForCausalLM"};
  write_qwen_experts(c, json);
}

void read_qwen3_5_moe(const Keys& keys, ModelConfig& c) { read_with_vision(keys, c, read_qwen3_5_moe_text); }

// ---- Qwen3-Next

void read_qwen3_next(const Keys& keys, ModelConfig& c) {
  read_qwen_layers(keys, c, {151936, 2048, 5632, 48, 16, 2, 256});
  read_qwen_experts(keys, c, {512, 10, 512, 512});
  c.experts.normalise = keys.truth("norm_topk_prob", true);
  keys.must_be("decoder_sparse_step", 1);
}

void write_qwen3_next(const ModelConfig& c, Json& json) {
  write_qwen3_5_text(c, json);
  json["architectures"] = {"Qwen3NextForCausalLM"};
  write_qwen_experts(c, json);
  json.update(
      {{"norm_topk_prob", c.experts.normalise}, {"decoder_sparse_step", 1}, {"mlp_only_layers", Json::array()}});
}

HfTensor qwen3_next_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0 || c.layer_kind(layer) == LayerKind::kAttention || !part.starts_with("attn."))
    return qwen3_5_tensor(c, spec);
  // Of every key head its query, key, values and their gates, and of its value heads b and a.
  const RecurrentMixerSpec mixer = c.mixer_spec();
  const int64_t per_key = mixer.v_heads / mixer.heads, K = mixer.key_dim, values = per_key * mixer.value_dim,
                stride = 2 * (K + values);
  struct Source {
    std::string_view ours;
    const char* theirs;
    int64_t first, block, stride;
  };
  const Source sources[] = {{"q_proj.weight", "in_proj_qkvz", 0, K, stride},
                            {"k_proj.weight", "in_proj_qkvz", K, K, stride},
                            {"v_proj.weight", "in_proj_qkvz", 2 * K, values, stride},
                            {"g_proj.weight", "in_proj_qkvz", 2 * K + values, values, stride},
                            {"b_proj.weight", "in_proj_ba", 0, per_key, 2 * per_key},
                            {"a_proj.weight", "in_proj_ba", per_key, per_key, 2 * per_key}};
  for (const Source& source : sources) {
    if (part.substr(5) != source.ours) continue;
    HfTensor tensor = in_layer_of(layer, fmt::format("linear_attn.{}.weight", source.theirs));
    tensor.first = source.first;
    tensor.rows = mixer.heads * source.stride;
    tensor.block = source.block;
    tensor.stride = source.stride;
    return tensor;
  }
  return qwen3_5_tensor(c, spec);
}

// ---- Kimi Linear

namespace {

// Layers by number from 1, as the published configuration has them.
void read_numbered_layers(const Keys& keys, const Keys& inner, ModelConfig& c) {
  c.layers.assign(static_cast<size_t>(c.num_hidden_layers), "recurrent");
  const Json* full = inner.find("full_attn_layers");
  inner.have_no_effect({"kda_layers"});
  if (full == nullptr || !full->is_array())
    inner.fail("full_attn_layers", "the numbers of the layers with attention, from 1",
               full == nullptr ? Json() : *full);
  for (const Json& layer : *full) {
    const bool known = layer.is_number_integer() && layer.get<double>() >= 1 &&
                       layer.get<double>() <= static_cast<double>(c.num_hidden_layers);
    if (!known) inner.fail("full_attn_layers", fmt::format("numbers from 1 to {}", c.num_hidden_layers), layer);
    c.layers[layer.get<size_t>() - 1] = "attention";
  }
  if (keys.has("layer_types")) keys.fail("layer_types", "no list beside linear_attn_config", *keys.find("layer_types"));
}

void read_kimi_layers(const Keys& keys, ModelConfig& c) {
  constexpr int64_t kInterval = 4;
  int64_t heads = 32, dim = 128, width = 4;
  if (keys.has("linear_attn_config")) {
    const Keys inner = keys.inner("linear_attn_config");
    heads = inner.whole("num_heads", heads);
    dim = inner.whole("head_dim", dim);
    width = inner.whole("short_conv_kernel_size", width);
    read_numbered_layers(keys, inner, c);
    inner.finish();
  } else if (keys.has("layer_types")) {
    read_layer_types(keys, c);
  } else {
    for (int64_t i = 0; i < c.num_hidden_layers; ++i)
      c.layers.emplace_back(i > 0 && i % kInterval == 0 ? "attention" : "recurrent");
  }
  for (std::string& layer : c.layers) layer = layer == "attention" ? "mla" : layer;
  c.layers.resize(std::max<size_t>(period(c.layers), c.layers.empty() ? 0 : 1));
  if (c.layers == StringList{"recurrent"}) c.layers.clear();
  c.num_heads = keys.whole("linear_num_heads", heads);
  c.head_dim = keys.whole("linear_head_dim", dim);
  c.conv_size = keys.whole("linear_conv_kernel_dim", width);
  check_count(keys, "linear_num_heads", c.num_heads);
  check_count(keys, "linear_head_dim", c.head_dim);
  c.rule = "kda";
  c.expand_v = 1;
  c.decay_rank = c.output_gate_rank = c.head_dim;
  c.output_gate = "sigmoid";
  c.output_gate_bias = false;
}

void read_kimi_attention(const Keys& keys, ModelConfig& c) {
  c.mla.num_heads = keys.whole("num_attention_heads", 32);
  check_count(keys, "num_attention_heads", c.mla.num_heads);
  keys.must_agree("num_key_value_heads", c.mla.num_heads, "num_attention_heads");
  c.mla.kv_rank = keys.whole("kv_lora_rank", 512);
  c.mla.key_dim = keys.whole("qk_nope_head_dim", 128);
  c.mla.shared_key_dim = keys.whole("qk_rope_head_dim", 64);
  c.mla.value_dim = keys.whole("v_head_dim", 128);
  keys.must_be_absent("q_lora_rank");
  keys.must_be("attention_bias", false);
  keys.must_be("mla_use_nope", true);
  keys.must_be_absent("rope_scaling");
  // sums of others; of the rotation that it has not
  keys.have_no_effect({"head_dim", "qk_head_dim", "rope_theta", "rope_parameters"});
}

void read_kimi_experts(const Keys& keys, ModelConfig& c) {
  ExpertsKeys& e = c.experts;
  c.mlp = "experts";
  e.router = "sigmoid";
  e.correction_bias = true;
  keys.must_be_one_of("moe_router_activation_func", {"sigmoid"});
  e.num_experts = keys.whole(keys.spelling({"num_experts", "num_local_experts"}), 256);
  e.top_k = keys.whole(keys.spelling({"num_experts_per_token", "num_experts_per_tok"}), 8);
  e.intermediate_size = keys.whole("moe_intermediate_size", 1024);
  const int64_t shared = keys.whole(keys.spelling({"num_shared_experts", "n_shared_experts"}), 1);
  if (shared < 0 || shared > 1024 || e.intermediate_size < 1 || e.intermediate_size > int64_t{1} << 24)
    fail_usage("{}: num_shared_experts, moe_intermediate_size: expected 0 to 1024 and 1 to 2^24, got {} and {}",
               keys.where(), shared, e.intermediate_size);
  e.shared_size = shared * e.intermediate_size;
  e.normalise = keys.truth(keys.spelling({"moe_renormalize", "norm_topk_prob"}), true);
  e.scale = keys.number("routed_scaling_factor", 2.446);
  e.groups = keys.whole(keys.spelling({"num_expert_group", "n_group"}), 1);
  e.top_groups = keys.whole("topk_group", 1);
  keys.must_be("moe_layer_freq", 1);
  e.dense_layers = keys.whole("first_k_dense_replace", 1);
  const Json* types = keys.find("mlp_layer_types");
  if (types != nullptr) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != c.num_hidden_layers)
      keys.fail("mlp_layer_types", fmt::format("a list of {} names, as there are layers", c.num_hidden_layers), *types);
    e.dense_layers = 0;
    for (size_t i = 0; i < types->size(); ++i) {
      const bool dense = (*types)[i] == "dense", follows = static_cast<int64_t>(i) == e.dense_layers;
      if (dense ? !follows : (*types)[i] != "sparse")
        keys.fail("mlp_layer_types", "dense for the first layers, sparse for the others", *types);
      if (dense) ++e.dense_layers;
    }
  }
  // of training in transformers; grouped or not, one group is all; the number that a missing key stands for
  keys.have_no_effect({"output_router_logits", "use_grouped_topk", "num_nextn_predict_layers", "pretraining_tp"});
}

}  // namespace

void read_kimi_linear(const Keys& keys, ModelConfig& c) {
  c.vocab_size = keys.whole("vocab_size", 163840);
  c.hidden_size = keys.whole("hidden_size", 2304);
  c.intermediate_size = keys.whole("intermediate_size", 9216);
  c.num_hidden_layers = keys.whole("num_hidden_layers", 27);
  for (const auto& [key, value] : {std::pair("vocab_size", c.vocab_size), std::pair("hidden_size", c.hidden_size),
                                   std::pair("intermediate_size", c.intermediate_size)})
    check_count(keys, key, value);
  if (c.num_hidden_layers < 1 || c.num_hidden_layers > 1 << 14)
    fail_usage("{}: num_hidden_layers: expected 1 to 16384, got {}", keys.where(), c.num_hidden_layers);
  c.norm_eps = keys.number("rms_norm_eps", 1e-5);
  c.init = "normal";
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", false);
  keys.must_be_one_of("hidden_act", kSilu);
  keys.have_no_effect({"model_max_length"});
  read_kimi_layers(keys, c);
  read_kimi_attention(keys, c);
  read_kimi_experts(keys, c);
}

void write_kimi_linear(const ModelConfig& c, Json& json) {
  const MlaSpec mla = c.mla_spec();
  const ExpertsSpec e = c.mlp_spec(c.num_hidden_layers).experts;
  Json types = Json::array(), mlps = Json::array();
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    types.push_back(c.layer_kind(i) == LayerKind::kMla ? "full_attention" : "linear_attention");
    mlps.push_back(i < c.dense_layers() ? "dense" : "sparse");
  }
  json.update({{"architectures", {"KimiLinearForCausalLM"}},
               {"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"intermediate_size", c.mlp_size()},
               {"num_hidden_layers", c.num_hidden_layers},
               {"rms_norm_eps", c.norm_eps},
               {"hidden_act", "silu"},
               {"tie_word_embeddings", c.tie_word_embeddings},
               {"layer_types", types},
               {"mlp_layer_types", mlps},
               {"linear_num_heads", c.num_heads},
               {"linear_head_dim", c.head_dim},
               {"linear_conv_kernel_dim", c.conv_size},
               {"num_attention_heads", mla.heads},
               {"num_key_value_heads", mla.heads},
               {"kv_lora_rank", mla.rank},
               {"qk_nope_head_dim", mla.key_dim},
               {"qk_rope_head_dim", mla.shared_dim},
               {"v_head_dim", mla.value_dim},
               {"q_lora_rank", Json()},
               {"num_experts", e.router.experts},
               {"num_experts_per_token", e.router.chosen},
               {"moe_intermediate_size", e.size},
               {"num_shared_experts", e.size > 0 ? e.shared_size / e.size : 0},
               {"moe_renormalize", e.router.normalised},
               {"routed_scaling_factor", e.router.scale},
               {"num_expert_group", e.router.groups},
               {"topk_group", e.router.best_groups}});
}

HfTensor kimi_linear_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0) return {spec.name == "model.embeddings.weight" ? "model.embed_tokens.weight" : spec.name};
  if (part == "attn_norm.weight") return in_layer_of(layer, "input_layernorm.weight");
  if (part == "mlp_norm.weight") return in_layer_of(layer, "post_attention_layernorm.weight");
  constexpr std::string_view kShared = "mlp.shared_expert.";
  if (part.starts_with(kShared))
    return in_layer_of(layer, fmt::format("mlp.shared_experts.{}", part.substr(kShared.size())));
  if (!part.starts_with("attn.")) return in_layer_of(layer, part);
  const std::string_view name = part.substr(5);
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"f_proj.0.weight", "forget_gate.f_a_proj.weight"},
      {"f_proj.1.weight", "forget_gate.f_b_proj.weight"},
      {"A_log", "forget_gate.A_log"},
      {"dt_bias", "forget_gate.dt_bias"},
      {"g_proj.0.weight", "g_a_proj.weight"},
      {"g_proj.1.weight", "g_b_proj.weight"}};
  for (const auto& [ours, theirs] : kNames) {
    if (name != ours) continue;
    HfTensor tensor = in_layer_of(layer, fmt::format("self_attn.{}", theirs));
    if (ours == "A_log") tensor.shape = {1, 1, spec.shape[0], 1};
    return tensor;
  }
  if (!name.ends_with("_conv1d.weight")) return in_layer_of(layer, fmt::format("self_attn.{}", name));
  HfTensor tensor = in_layer_of(layer, "self_attn.conv1d.weight");
  const RecurrentMixerSpec mixer = c.mixer_spec();
  tensor.rows = mixer.conv_channels();
  tensor.first = name[0] == 'q' ? 0 : name[0] == 'k' ? mixer.key_size() : mixer.value_begin();
  return tensor;
}

HfTensor kimi_linear_published_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0) return {};
  HfTensor tensor = kimi_linear_tensor(c, spec);
  const auto rename = [&](std::string_view from, std::string_view to) {
    const size_t at = tensor.name.find(from);
    if (at == std::string::npos) return false;
    tensor.name.replace(at, from.size(), to);
    return true;
  };
  if (part.starts_with("mlp."))
    return layer >= c.dense_layers() && rename(".mlp.", ".block_sparse_moe.") ? tensor : HfTensor();
  if (part.ends_with("_conv1d.weight")) return in_layer_of(layer, fmt::format("self_attn.{}", part.substr(5)));
  return rename(".forget_gate.", ".") ? tensor : HfTensor();
}

}  // namespace fw::hf
