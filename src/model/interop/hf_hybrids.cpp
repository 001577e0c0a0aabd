#include "model/interop/hf_hybrids.h"

#include <charconv>
#include <string>
#include <utility>

#include "base/error.h"
#include "model/interop/hf_parts.h"
#include "model/interop/hf_types.h"

namespace fw::hf {
namespace {

constexpr const char *kLinearType = "linear_attention", *kFullType = "full_attention";
constexpr int64_t kInterval = 4;         // every fourth layer is attention
constexpr double kOlmoOutputEps = 1e-5;  // of the recurrent layers' output norm, whatever the configuration says

void read_sizes(const Keys& keys, ModelConfig& c, int64_t vocab, int64_t hidden, int64_t intermediate, int64_t layers) {
  c.vocab_size = keys.whole("vocab_size", vocab);
  c.hidden_size = keys.whole("hidden_size", hidden);
  c.intermediate_size = keys.whole("intermediate_size", intermediate);
  c.num_hidden_layers = keys.whole("num_hidden_layers", layers);
  c.norm_eps = keys.number("rms_norm_eps", 1e-6);
  c.init = "normal";
  keys.must_be_one_of("hidden_act", kSilu);
  check_count(keys, "hidden_size", c.hidden_size);
  check_count(keys, "intermediate_size", c.intermediate_size);
  if (c.num_hidden_layers < 1 || c.num_hidden_layers > 1 << 14)
    fail_usage("{}: num_hidden_layers: expected 1 to 16384, got {}", keys.where(), c.num_hidden_layers);
}

void write_sizes(const ModelConfig& c, Json& json) {
  const AttentionSpec attention = c.attention_spec(c.attention, 0);
  json.update({{"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"intermediate_size", c.mlp_size()},
               {"num_hidden_layers", c.num_hidden_layers},
               {"rms_norm_eps", c.norm_eps},
               {"hidden_act", "silu"},
               {"tie_word_embeddings", c.tie_word_embeddings},
               {"attention_bias", false},
               {"num_attention_heads", attention.heads},
               {"num_key_value_heads", attention.kv_heads},
               {"layer_types", write_layer_types(c)}});
  write_linear_heads(c, json);
}

Json rope_json(const AttentionKeys& a) {
  return {{"rope_type", "default"}, {"rope_theta", a.rope_theta > 0 ? Json(a.rope_theta) : Json()}};
}

// A tensor that q, k and v share, in this order, in the rows that they have in the parameters' stack.
HfTensor shared_qkv(const RecurrentMixerSpec& spec, std::string name, char part) {
  return {std::move(name), part == 'q' ? 0 : part == 'k' ? spec.key_size() : spec.value_begin(), spec.conv_channels()};
}

// Names outside the layers.
HfTensor outer_tensor(const std::string& name) {
  return {name == "model.embeddings.weight" ? "model.embed_tokens.weight" : name};
}

std::string in_layer(int64_t layer, std::string_view part) { return fmt::format("model.layers.{}.{}", layer, part); }

}  // namespace

void check_count(const Keys& keys, const char* key, int64_t value) {
  if (value < 1 || value > int64_t{1} << 24) fail_usage("{}: {}: expected 1 to 2^24, got {}", keys.where(), key, value);
}

void read_layer_types(const Keys& keys, ModelConfig& c) {
  const int64_t interval = keys.whole("full_attention_interval", kInterval);
  if (interval < 1) keys.fail("full_attention_interval", "at least 1", interval);
  StringList layers;
  if (const Json* types = keys.find("layer_types"); types != nullptr) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != c.num_hidden_layers)
      keys.fail("layer_types", fmt::format("a list of {} names, as there are layers", c.num_hidden_layers), *types);
    for (const Json& type : *types) {
      if (type != kLinearType && type != kFullType)
        keys.fail("layer_types", fmt::format("{} or {} for every layer", kLinearType, kFullType), type);
      layers.emplace_back(type == kLinearType ? "recurrent" : "attention");
    }
  } else {
    for (int64_t i = 0; i < c.num_hidden_layers; ++i)
      layers.emplace_back((i + 1) % interval == 0 ? "attention" : "recurrent");
  }
  layers.resize(period(layers));
  c.layers = layers == StringList{"recurrent"} ? StringList() : layers;
}

Json write_layer_types(const ModelConfig& c) {
  Json types = Json::array();
  for (int64_t i = 0; i < c.num_hidden_layers; ++i)
    types.push_back(c.layer_kind(i) == LayerKind::kAttention ? kFullType : kLinearType);
  return types;
}

void read_rope(const Keys& keys, AttentionKeys& a, double fraction) {
  a.rope_theta = keys.number("rope_theta", kTheta);
  a.rope_fraction = keys.number("partial_rotary_factor", fraction);
  keys.must_be_absent("rope_scaling");
  if (keys.is_null("rope_parameters"))
    keys.fail("rope_parameters", "an object, {\"rope_theta\": null} for no rotation", Json());
  if (!keys.has("rope_parameters")) return;
  if (!keys.find("rope_parameters")->is_object())
    keys.fail("rope_parameters", "an object", *keys.find("rope_parameters"));
  const Keys inner = keys.inner("rope_parameters");
  const double theta = inner.number("rope_theta", a.rope_theta);
  if (keys.has("rope_theta") && theta != a.rope_theta)
    inner.fail("rope_theta", fmt::format("{} as rope_theta beside it says", a.rope_theta), theta);
  a.rope_theta = inner.is_null("rope_theta") ? 0 : theta;
  a.rope_fraction = inner.number("partial_rotary_factor", a.rope_fraction);
  inner.must_be(inner.spelling({"rope_type", "type"}), "default");
  inner.have_no_effect({"mrope_section", "mrope_interleaved"});  // of a text all positions are equal
  inner.finish();
}

void read_attention_heads(const Keys& keys, ModelConfig& c, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  c.attention.num_heads = keys.whole("num_attention_heads", heads);
  check_count(keys, "num_attention_heads", c.attention.num_heads);
  c.attention.num_kv_heads = keys.whole("num_key_value_heads", kv_heads > 0 ? kv_heads : c.attention.num_heads);
  check_count(keys, "num_key_value_heads", c.attention.num_kv_heads);
  c.attention.head_dim = keys.whole("head_dim", head_dim > 0 ? head_dim : c.hidden_size / c.attention.num_heads);
  check_count(keys, "head_dim", c.attention.head_dim);
}

void read_linear_heads(const Keys& keys, ModelConfig& c, const LinearDefaults& standard) {
  c.rule = "gated_deltanet";
  c.output_gate = "silu";
  c.num_heads = keys.whole("linear_num_key_heads", standard.key_heads);
  c.num_v_heads = keys.whole("linear_num_value_heads", standard.value_heads);
  check_count(keys, "linear_num_key_heads", c.num_heads);
  check_count(keys, "linear_num_value_heads", c.num_v_heads);
  // OLMo's follow from others
  const int64_t key_dim = standard.key_dim > 0 ? standard.key_dim : 3 * c.hidden_size / (4 * c.num_heads);
  c.head_dim = keys.whole("linear_key_head_dim", key_dim);
  check_count(keys, "linear_key_head_dim", c.head_dim);
  const int64_t value_dim =
      keys.whole("linear_value_head_dim", standard.value_dim > 0 ? standard.value_dim : 2 * c.head_dim);
  check_count(keys, "linear_value_head_dim", value_dim);
  c.expand_v = static_cast<double>(value_dim) / static_cast<double>(c.head_dim);
  c.conv_size = keys.whole("linear_conv_kernel_dim", 4);
  check_count(keys, "linear_conv_kernel_dim", c.conv_size);
}

void write_linear_heads(const ModelConfig& c, Json& json) {
  json.update({{"linear_num_key_heads", c.num_heads},
               {"linear_num_value_heads", c.v_heads()},
               {"linear_key_head_dim", c.head_dim},
               {"linear_value_head_dim", c.head_v_dim()},
               {"linear_conv_kernel_dim", c.conv_size}});
}

LayerName layer_name(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  LayerName result;
  if (!name.starts_with(kLayers)) return result;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kLayers.size(), end, result.layer);
  if (error != std::errc() || stop == end || *stop != '.') return {};
  result.part = std::string_view(stop + 1, static_cast<size_t>(end - stop - 1));
  return result;
}

// ---- Qwen3.5

void read_qwen_layers(const Keys& keys, ModelConfig& c, const QwenDefaults& standard) {
  read_sizes(keys, c, standard.vocab, standard.hidden, standard.intermediate, standard.layers);
  read_layer_types(keys, c);
  read_linear_heads(keys, c, {16, 32, 128, 128});
  read_attention_heads(keys, c, standard.heads, standard.kv_heads, standard.head_dim);
  read_rope(keys, c.attention, 0.25);
  c.norm = "zero_centered_rms";
  c.attention.qk_norm = c.attention.output_gate = true;
  c.attention.qk_norm_eps = c.norm_eps;
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", false);
  keys.must_be("attn_output_gate", true);
  keys.must_be("mlp_only_layers", Json::array());
  // the layers that predict further tokens are left aside; states are float32 here
  keys.have_no_effect({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"});
}

void read_qwen3_5_text(const Keys& keys, ModelConfig& c) {
  read_qwen_layers(keys, c, {248320, 4096, 12288, 32, 16, 4, 256});
}

void write_qwen3_5_text(const ModelConfig& c, Json& json) {
  write_sizes(c, json);
  json["architectures"] = {"Qwen3_5ForCausalLM"};
  json["head_dim"] = c.attention_spec(c.attention, 0).head_dim;
  json["rope_parameters"] = rope_json(c.attention);
  json["rope_parameters"]["partial_rotary_factor"] = c.attention.rope_fraction;
}

HfTensor qwen3_5_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0) return outer_tensor(spec.name);
  const auto named = [at = layer](std::string_view theirs) { return HfTensor{in_layer(at, theirs)}; };
  if (part == "attn_norm.weight") return named("input_layernorm.weight");
  if (part == "mlp_norm.weight") return named("post_attention_layernorm.weight");
  if (!part.starts_with("attn.")) return named(part);
  const std::string_view name = part.substr(5);
  if (c.layer_kind(layer) == LayerKind::kAttention) {
    const bool gate = name == "g_proj.weight";
    if (!gate && name != "q_proj.weight") return named(fmt::format("self_attn.{}", name));
    // of every head its queries, then its gate
    const AttentionSpec attention = c.attention_spec(c.attention, 0);
    HfTensor tensor = named("self_attn.q_proj.weight");
    tensor.rows = 2 * attention.query_size();
    tensor.first = gate ? attention.head_dim : 0;
    tensor.block = attention.head_dim;
    tensor.stride = 2 * attention.head_dim;
    return tensor;
  }
  const RecurrentMixerSpec mixer = c.mixer_spec();
  for (const char q : {'q', 'k', 'v'}) {
    if (name == fmt::format("{}_proj.weight", q))
      return shared_qkv(mixer, in_layer(layer, "linear_attn.in_proj_qkv.weight"), q);
    if (name == fmt::format("{}_conv1d.weight", q))
      return shared_qkv(mixer, in_layer(layer, "linear_attn.conv1d.weight"), q);
  }
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"a_proj.weight", "in_proj_a.weight"},
                                                                      {"b_proj.weight", "in_proj_b.weight"},
                                                                      {"g_proj.weight", "in_proj_z.weight"},
                                                                      {"o_norm.weight", "norm.weight"},
                                                                      {"o_proj.weight", "out_proj.weight"}};
  for (const auto& [ours, theirs] : kNames) {
    if (name == ours) return named(fmt::format("linear_attn.{}", theirs));
  }
  return named(fmt::format("linear_attn.{}", name));
}

HfTensor qwen3_5_nested_tensor(const ModelConfig& c, const ParamSpec& spec) {
  HfTensor tensor = qwen3_5_tensor(c, spec);
  if (!tensor.name.starts_with("model.")) return {};
  tensor.name.insert(6, "language_model.");
  return tensor;
}

void read_qwen3_5(const Keys& keys, ModelConfig& c) { read_with_vision(keys, c, read_qwen3_5_text); }

void read_with_vision(const Keys& keys, ModelConfig& c, void (*read)(const Keys&, ModelConfig&)) {
  const Json* text = keys.find("text_config");
  if (text == nullptr || !text->is_object())
    keys.fail("text_config", "the object of the text model", text == nullptr ? Json() : *text);
  const Keys inner = keys.inner("text_config");
  read(inner, c);
  inner.finish();
  // The head follows the outer key; the inner one says the same or nothing.
  const bool tied = keys.truth("tie_word_embeddings", c.tie_word_embeddings);
  if (inner.has("tie_word_embeddings") && tied != c.tie_word_embeddings)
    inner.fail("tie_word_embeddings", fmt::format("{} as the key outside says", tied), c.tie_word_embeddings);
  c.tie_word_embeddings = tied;
  keys.must_agree("hidden_size", c.hidden_size, "hidden_size of text_config");
  keys.have_no_effect({"vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
                       "vision_end_token_id", "language_model_only"});
}

// ---- OLMo hybrid

void read_olmo_hybrid(const Keys& keys, ModelConfig& c) {
  read_sizes(keys, c, 100352, 3840, 11008, 32);
  read_layer_types(keys, c);
  read_attention_heads(keys, c, 30, 0, 0);
  read_linear_heads(keys, c, {c.attention.num_heads, c.attention.num_heads, 0, 0});
  read_rope(keys, c.attention, 1);
  c.allow_neg_eigval = keys.truth("linear_allow_neg_eigval", true);
  c.output_norm_eps = kOlmoOutputEps;
  c.attention.qk_norm = c.attention.qk_norm_all_heads = c.attention.post_norm = true;
  c.attention.qk_norm_eps = c.norm_eps;
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", false);
  keys.must_be("linear_use_gate", true);
  // layer_types says both
  if (keys.has("layer_types")) keys.have_no_effect({"fla_hybrid_attention_indices", "sliding_window"});
  // first values
  keys.have_no_effect(
      {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"});
}

void write_olmo_hybrid(const ModelConfig& c, Json& json) {
  write_sizes(c, json);
  json["architectures"] = {"OlmoHybridForCausalLM"};
  json["rope_parameters"] = rope_json(c.attention);
  json["linear_allow_neg_eigval"] = c.resolved_rule().gain_bound > 1;
}

HfTensor olmo_hybrid_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0) return outer_tensor(spec.name);
  const bool attention = c.layer_kind(layer) == LayerKind::kAttention;
  const auto named = [at = layer](std::string_view theirs) { return HfTensor{in_layer(at, theirs)}; };
  if (part == "attn_norm.weight")
    return named(attention ? "post_attention_layernorm.weight" : "input_layernorm.weight");
  if (part == "mlp_norm.weight")
    return named(attention ? "post_feedforward_layernorm.weight" : "post_attention_layernorm.weight");
  if (!part.starts_with("attn.")) return named(part);
  const std::string_view name = part.substr(5);
  if (attention) return named(fmt::format("self_attn.{}", name));
  for (const char q : {'q', 'k', 'v'}) {
    if (name == fmt::format("{}_conv1d.weight", q))
      return shared_qkv(c.mixer_spec(), in_layer(layer, "linear_attn.conv1d.weight"), q);
  }
  return named(fmt::format("linear_attn.{}", name));
}

HfTensor olmo_hybrid_first_tensor(const ModelConfig& c, const ParamSpec& spec) {
  const auto [layer, part] = layer_name(spec.name);
  if (layer < 0) return {};
  if (c.layer_kind(layer) == LayerKind::kAttention) {
    // transformers 5.24 renames post_attention_layernorm in every layer when it saves
    return part == "attn_norm.weight" ? HfTensor{in_layer(layer, "feedforward_layer_norm.weight")} : HfTensor();
  }
  if (part == "attn_norm.weight") return {in_layer(layer, "attention_layer_norm.weight")};
  if (part == "mlp_norm.weight") return {in_layer(layer, "feedforward_layer_norm.weight")};
  if (part.ends_with("_conv1d.weight")) return {in_layer(layer, fmt::format("linear_attn.{}", part.substr(5)))};
  return {};
}

}  // namespace fw::hf
