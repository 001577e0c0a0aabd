#include "model/peer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr const char* kOurs = "fastweight";

// The peer's configuration with its defaults: keys that are absent or null have the value that the caller names.
class Keys {
 public:
  Keys(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t whole(const char* key, int64_t standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    constexpr double kMost = 4e18;
    if (!value->is_number_integer() || std::abs(value->get<double>()) > kMost) fail(key, "a whole number", *value);
    return value->get<int64_t>();
  }
  double number(const char* key, double standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_number() || !(std::abs(value->get<double>()) < 1e12)) fail(key, "a number", *value);
    return value->get<double>();
  }
  bool truth(const char* key, bool standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_boolean()) fail(key, "true or false", *value);
    return value->get<bool>();
  }
  std::string text(const char* key, const char* standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_string()) fail(key, "a string", *value);
    return value->get<std::string>();
  }
  // The layer here computes one value of this key only.
  void must_be(const char* key, const Json& only) const {
    const Json* value = find(key);
    if (value != nullptr && *value != only) fail(key, shown(only) + " (nothing else is computed here)", *value);
  }
  void must_be_absent(const char* key) const {
    const Json* value = find(key);
    if (value != nullptr) fail(key, "null (nothing else is computed here)", *value);
  }
  [[noreturn]] void fail(const char* key, const std::string& expected, const Json& came) const {
    fail_usage("{}: {}: expected {}, got {}", where_, key, expected, shown(came));
  }
  const std::string& where() const { return where_; }

 private:
  const Json& json_;
  std::string where_;
};

// Another name that a peer's type has for one of our parameters; both are parts of a name between dots.
struct Rename {
  const char* ours;
  const char* theirs;
};

// One type of model: its configuration as ours, ours as its, and what its parameters are called.
struct Type {
  const char* name;  // model_type, or that of the mixer (gdn2)
  void (*read)(const Keys&, ModelConfig&);
  void (*write)(const ModelConfig&, Json&);
  std::array<Rename, 2> renames = {};
};

// The shortest beginning that repeated to the length gives the whole list.
size_t period(const StringList& list) {
  for (size_t n = 1; n < list.size(); ++n) {
    bool repeats = true;
    for (size_t i = n; i < list.size() && repeats; ++i) repeats = list[i] == list[i - n];
    if (repeats) return n;
  }
  return list.size();
}

// What all of them have.
void read_common(const Keys& keys, ModelConfig& c, int64_t hidden, int64_t layers, double ratio) {
  c.vocab_size = keys.whole("vocab_size", 32000);
  c.hidden_size = keys.whole("hidden_size", hidden);
  c.num_hidden_layers = keys.whole("num_hidden_layers", layers);
  c.norm_eps = keys.number("norm_eps", 1e-6);
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", false);
  c.init = "normal";
  c.intermediate_size = keys.whole("intermediate_size", 0);
  if (c.intermediate_size == 0) {
    const double width = static_cast<double>(c.hidden_size) * keys.number("hidden_ratio", ratio) * 2 / 3;
    if (!(width >= 0 && width < 1e15)) fail_usage("{}: hidden_ratio: expected a number that makes the MLP 0 to 1e15 wide, got {}", keys.where(), width);
    c.intermediate_size = 256 * ((static_cast<int64_t>(width) + 255) / 256);
  }
  keys.must_be("hidden_act", "swish");
  keys.must_be("elementwise_affine", true);
  keys.must_be_absent("attnres_block_size");
}

void read_heads(const Keys& keys, ModelConfig& c, int64_t heads, int64_t head_dim, double expand_v) {
  c.num_heads = keys.whole("num_heads", heads);
  c.num_v_heads = keys.whole("num_v_heads", 0);
  c.head_dim = keys.whole("head_dim", head_dim);
  c.expand_v = keys.number("expand_v", expand_v);
  // Before anything is computed with them; validate() has the exact limits.
  if (c.head_dim < 1 || c.head_dim > 1 << 20) fail_usage("{}: head_dim: expected 1 to 4096, got {}", keys.where(), c.head_dim);
  if (!(c.expand_v > 0 && c.expand_v <= 65536)) fail_usage("{}: expand_v: expected a number from 0 to 65536, got {}", keys.where(), c.expand_v);
}

// The older layers say the widths of all heads together, in shares of the model's.
void read_shares(const Keys& keys, ModelConfig& c, int64_t heads, double expand_k, double expand_v) {
  c.num_heads = keys.whole("num_heads", heads);
  c.num_v_heads = 0;
  if (c.num_heads < 1) fail_usage("{}: num_heads: expected at least 1, got {}", keys.where(), c.num_heads);
  const auto size = [&](const char* key, double standard) {
    const double width = static_cast<double>(c.hidden_size) * keys.number(key, standard);
    return width >= 1 && width <= 1e12 ? static_cast<int64_t>(width) : 0;
  };
  const int64_t key_size = size("expand_k", expand_k), value_size = size("expand_v", expand_v);
  if (key_size < 1 || value_size < 1 || key_size % c.num_heads != 0 || value_size % c.num_heads != 0) {
    fail_usage("{}: expand_k, expand_v: expected widths of keys and values that {} heads divide, got {} and {}", keys.where(), c.num_heads, key_size,
               value_size);
  }
  c.head_dim = key_size / c.num_heads;
  c.expand_v = static_cast<double>(value_size) / static_cast<double>(key_size);
  const Json* groups = keys.find("num_kv_heads");
  if (groups != nullptr && *groups != c.num_heads)
    keys.fail("num_kv_heads", fmt::format("num_heads = {} (grouped keys are not computed here)", c.num_heads), *groups);
}

// One attention layer, of a whole model or of the layers that `attn` names. Its heads are hidden_size / num_heads wide.
void read_attention(const Keys& keys, ModelConfig& c, AttentionKeys& a) {
  a.num_heads = keys.whole("num_heads", 32);
  if (a.num_heads < 1 || a.num_heads > 1 << 16) fail_usage("{}: num_heads: expected 1 to 65536, got {}", keys.where(), a.num_heads);
  if (c.hidden_size % a.num_heads != 0)
    fail_usage("{}: num_heads: expected a number that divides hidden_size = {}, got {}", keys.where(), c.hidden_size, a.num_heads);
  a.num_kv_heads = keys.whole("num_kv_heads", a.num_heads);
  a.head_dim = c.hidden_size / a.num_heads;
  a.rope_theta = keys.number("rope_theta", 10000.0);
  a.qk_norm = keys.truth("qk_norm", false);
  a.qkv_bias = keys.truth("qkv_bias", false);
}
// The kind of those layers: with a window or without.
const char* read_attention_kind(const Keys& keys, ModelConfig& c) {
  const bool all = keys.find("window_size") == nullptr;
  if (!all) c.window.window = keys.whole("window_size", 0);
  read_attention(keys, c, all ? c.attention : c.window);
  return all ? "attention" : "window";
}

// A hybrid: the layers that `attn` names have attention in the mixer's place.
void read_hybrid(const Keys& keys, ModelConfig& c) {
  const Json* attn = keys.find("attn");
  if (attn == nullptr) return;
  if (!attn->is_object()) keys.fail("attn", "an object with layers and num_heads", *attn);
  const Keys inner(*attn, keys.where() + ": attn");
  const Json* layers = inner.find("layers");
  if (layers == nullptr || !layers->is_array()) inner.fail("layers", "the numbers of the layers with attention", layers == nullptr ? Json() : *layers);
  if (inner.find("num_heads") == nullptr) inner.fail("num_heads", "a whole number", Json());
  if (layers->empty()) return;
  if (c.num_hidden_layers < 1 || c.num_hidden_layers > 1 << 14)
    fail_usage("{}: num_hidden_layers: expected 1 to 16384, got {}", keys.where(), c.num_hidden_layers);
  const char* kind = read_attention_kind(inner, c);
  c.layers.assign(static_cast<size_t>(c.num_hidden_layers), "recurrent");
  for (const Json& layer : *layers) {
    const bool known = layer.is_number_integer() && layer.get<double>() >= 0 && layer.get<double>() < static_cast<double>(c.num_hidden_layers);
    if (!known) inner.fail("layers", fmt::format("numbers from 0 to {}", c.num_hidden_layers - 1), layer);
    c.layers[layer.get<size_t>()] = kind;
  }
  c.layers.resize(period(c.layers));
}

// The attention of a model's layers, in `json` itself or in its `attn`.
void write_attention(const ModelConfig& c, LayerKind kind, Json& json) {
  const AttentionKeys& keys = kind == LayerKind::kWindow ? c.window : c.attention;
  const AttentionSpec spec = c.attention_spec(keys, 0);
  json["num_heads"] = spec.heads;
  json["num_kv_heads"] = spec.kv_heads;
  json["rope_theta"] = spec.rope_theta;
  json["qkv_bias"] = spec.qkv_bias;
  if (spec.qk_norm) json["qk_norm"] = true;
  json["window_size"] = kind == LayerKind::kWindow ? Json(c.window.window) : Json();
}
void write_hybrid(const ModelConfig& c, Json& json) {
  Json layers = Json::array();
  LayerKind kind = LayerKind::kRecurrent;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    if (c.layer_kind(i) == LayerKind::kRecurrent) continue;
    kind = c.layer_kind(i);  // several kinds come back as one, which is not this model
    layers.push_back(i);
  }
  if (layers.empty()) return;
  Json attn = {{"layers", layers}};
  write_attention(c, kind, attn);
  json["attn"] = attn;
}

void read_conv(const Keys& keys, ModelConfig& c) {
  keys.must_be("use_short_conv", true);  // without it the peer still applies the activation
  keys.must_be("conv_bias", false);
  c.conv_size = keys.whole("conv_size", 4);
}

void write_common(const ModelConfig& c, Json& json) {
  json["vocab_size"] = c.vocab_size;
  json["hidden_size"] = c.hidden_size;
  json["num_hidden_layers"] = c.num_hidden_layers;
  json["norm_eps"] = c.norm_eps;
  json["tie_word_embeddings"] = c.tie_word_embeddings;
  json["intermediate_size"] = c.mlp_size();
  json["hidden_act"] = "swish";
  json["num_heads"] = c.num_heads;
}

void write_heads(const ModelConfig& c, Json& json) {
  write_common(c, json);
  json["num_v_heads"] = c.v_heads();
  json["head_dim"] = c.head_dim;
  json["expand_v"] = c.expand_v;
  json["use_short_conv"] = true;
  json["conv_size"] = c.conv_size;
}

void write_shares(const ModelConfig& c, Json& json) {
  write_common(c, json);
  const double hidden = static_cast<double>(c.hidden_size);
  json["expand_k"] = static_cast<double>(c.num_heads * c.head_dim) / hidden;
  json["expand_v"] = static_cast<double>(c.v_heads() * c.head_v_dim()) / hidden;
}

bool doubles(const ModelConfig& c) { return c.resolved_rule().gain_bound > 1.0; }

// ---- the types

void read_delta_net(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_shares(keys, c, 16, 1.0, 1.0);
  read_conv(keys, c);
  keys.must_be("qk_norm", "l2");
  keys.must_be("qk_activation", "silu");
  keys.must_be("use_output_norm", true);
  keys.must_be("use_beta", true);
  c.rule = "deltanet";
  c.allow_neg_eigval = keys.truth("allow_neg_eigval", false);
  c.output_gate = keys.truth("use_gate", false) ? "silu" : "none";
}
void write_delta_net(const ModelConfig& c, Json& json) {
  write_shares(c, json);
  json.update(
      {{"use_short_conv", true}, {"conv_size", c.conv_size}, {"qk_norm", "l2"}, {"qk_activation", "silu"}, {"use_beta", true}, {"use_output_norm", true}});
  json["allow_neg_eigval"] = doubles(c);
  json["use_gate"] = c.output_gate == "silu";
}

void read_gated(const Keys& keys, ModelConfig& c, const char* rule) {
  read_common(keys, c, 2048, 21, 4);
  read_heads(keys, c, 6, 256, 2.0);
  read_conv(keys, c);
  c.rule = rule;
  c.allow_neg_eigval = keys.truth("allow_neg_eigval", false);
  c.output_gate = keys.truth("use_gate", true) ? "silu" : "none";
}
void write_gated(const ModelConfig& c, Json& json) {
  write_heads(c, json);
  json["allow_neg_eigval"] = doubles(c);
  json["use_gate"] = c.output_gate == "silu";
}
void read_gated_deltanet(const Keys& keys, ModelConfig& c) { read_gated(keys, c, "gated_deltanet"); }

void read_precond(const Keys& keys, ModelConfig& c) {
  c.precond_x = keys.number("squash_x", 1.5);
  keys.must_be("squash_eps", 1e-6);
}
void write_precond(const ModelConfig& c, Json& json) { json.update({{"squash_x", c.precond_x}, {"squash_eps", 1e-6}}); }
void read_precond_gated(const Keys& keys, ModelConfig& c) {
  read_gated(keys, c, "precond_gated_deltanet");
  read_precond(keys, c);
}
void write_precond_gated(const ModelConfig& c, Json& json) {
  write_gated(c, json);
  write_precond(c, json);
}

// Decay and output gate of low rank, as wide as a value head.
void read_low_rank(ModelConfig& c, const char* rule, bool per_value_head) {
  c.rule = rule;
  c.output_gate = "sigmoid";
  c.output_gate_rank = c.decay_rank = c.head_v_dim();
  c.decay_per_value_head = per_value_head;
}
void read_kda_of(const Keys& keys, ModelConfig& c, const char* rule) {
  read_common(keys, c, 2048, 24, 4);
  read_heads(keys, c, 16, 128, 1.0);
  read_conv(keys, c);
  keys.must_be("safe_gate", false);
  keys.must_be_absent("lower_bound");
  c.allow_neg_eigval = keys.truth("allow_neg_eigval", false);
  read_low_rank(c, rule, true);
}
void read_kda(const Keys& keys, ModelConfig& c) { read_kda_of(keys, c, "kda"); }
void write_kda(const ModelConfig& c, Json& json) {
  write_heads(c, json);
  json["allow_neg_eigval"] = doubles(c);
}
void read_precond_kda(const Keys& keys, ModelConfig& c) {
  read_kda_of(keys, c, "precond_kda");
  read_precond(keys, c);
}
void write_precond_kda(const ModelConfig& c, Json& json) {
  write_kda(c, json);
  write_precond(c, json);
}

// The peer has this layer but no model of it: the model of kda with its mixers replaced.
void read_gdn2(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_conv(keys, c);
  const Keys mixer(*keys.find("mixer_override"), keys.where() + ": mixer_override");
  read_heads(mixer, c, 16, 128, 1.0);
  mixer.must_be("use_short_conv", true);
  c.conv_size = mixer.whole("conv_size", c.conv_size);
  c.allow_neg_eigval = mixer.truth("allow_neg_eigval", false);
  read_low_rank(c, "gated_deltanet2", false);
}
void write_gdn2(const ModelConfig& c, Json& json) {
  write_heads(c, json);
  json["model_type"] = "kda";
  Json mixer = {{"type", "gdn2"}, {"allow_neg_eigval", doubles(c)}};
  for (const char* key : {"num_heads", "num_v_heads", "head_dim", "expand_v"}) mixer[key] = json[key];
  json["mixer_override"] = mixer;
}

void read_linear_attn(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_shares(keys, c, 4, 1.0, 1.0);
  for (const char* key : {"tie_feature_map_qk", "norm_q", "norm_k", "norm_feature_map"}) keys.must_be(key, false);
  const std::string map = keys.text("feature_map", "elementwise_product");
  if (map != "elementwise_product" && map != "elu" && map != "relu" && map != "identity") {
    keys.fail("feature_map", "elementwise_product, elu, relu or identity", map);
  }
  c.feature_map = map == "elementwise_product" ? "product" : map == "identity" ? "none" : map;
  c.rule = "linear_attention";
  c.output_gate = "none";
  c.conv_size = 0;
}
void write_linear_attn(const ModelConfig& c, Json& json) {
  write_shares(c, json);
  json["feature_map"] = c.feature_map == "product" ? "elementwise_product" : c.feature_map == "none" ? "identity" : c.feature_map;
}

// p = sigmoid(decay) k is the erase key. The kernel normalises it, which cancels the inner decay (but for the norm's epsilon) in what
// is erased; it remains in q - D p.
void read_comba(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 21, 4);
  read_heads(keys, c, 6, 256, 2.0);
  read_conv(keys, c);
  if (c.v_heads() != c.num_heads) keys.fail("num_v_heads", fmt::format("num_heads = {} (the peer itself fails with others)", c.num_heads), c.num_v_heads);
  c.rule = "decay=scalar gain=gate q_norm=l2 k_norm=l2";
  if (keys.truth("use_inner_decay", true)) c.rule += " erase_key=own";
  c.raw_read_correction = keys.truth("use_output_correction", true);
  c.output_gate = keys.truth("use_output_gate", true) ? "sigmoid" : "none";
}
void write_comba(const ModelConfig& c, Json& json) {
  write_heads(c, json);
  json["use_inner_decay"] = c.resolved_rule().uses_erase_key();
  json["use_output_correction"] = c.raw_read_correction;
  json["use_output_gate"] = c.output_gate == "sigmoid";
}

// What gla and retnet have in common.
void read_plain(const Keys& keys, ModelConfig& c) {
  keys.must_be("conv_bias", false);
  c.conv_size = keys.truth("use_short_conv", false) ? keys.whole("conv_size", 4) : 0;
  const std::string map = keys.text("feature_map", "none");
  if (map != "none" && map != "relu") keys.fail("feature_map", "null or relu", map);
  c.feature_map = map;
  keys.must_be("fuse_norm", true);  // without it the peer names the norm otherwise
  c.output_gate = keys.truth("use_output_gate", true) ? "silu" : "none";
}
void write_plain(const ModelConfig& c, Json& json) {
  write_shares(c, json);
  json["use_short_conv"] = c.conv_size > 0;
  if (c.conv_size > 0) json["conv_size"] = c.conv_size;
  if (c.feature_map != "none") json["feature_map"] = c.feature_map;
  json["use_output_gate"] = c.output_gate == "silu";
}

constexpr int64_t kGlaRank = 16;  // the peer's model leaves it at its layer's default

void read_gla(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_shares(keys, c, 4, 0.5, 1.0);
  read_plain(keys, c);
  keys.must_be_absent("clamp_min");
  keys.must_be("use_gk", true);
  keys.must_be("use_gv", false);
  c.rule = "gla";
  c.decay_gate = "logsigmoid";
  c.decay_rank = kGlaRank;
}

// The norm of the whole width keeps its layer's epsilon, whatever the model's is.
constexpr double kHgrn2NormEps = 1e-5;

void read_hgrn2(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  keys.must_be("use_lower_bound", true);
  keys.must_be("use_short_conv", false);
  const Json* ratio = keys.find("expand_ratio");
  c.head_dim = ratio != nullptr || keys.find("num_heads") == nullptr ? keys.whole("expand_ratio", 128) : 0;
  c.num_heads = keys.whole("num_heads", c.head_dim > 0 ? c.hidden_size / c.head_dim : 0);
  if (c.num_heads < 1) fail_usage("{}: num_heads: expected at least 1, got {}", keys.where(), c.num_heads);
  if (c.head_dim == 0) c.head_dim = c.hidden_size / c.num_heads;
  if (c.num_heads > 1 << 16 || c.head_dim < 1 || c.head_dim > 4096 || c.num_heads * c.head_dim != c.hidden_size) {
    fail_usage("{}: expand_ratio: expected num_heads * expand_ratio = hidden_size = {} (the lower bounds are as wide), got {} * {}", keys.where(),
               c.hidden_size, c.num_heads, c.head_dim);
  }
  c.num_v_heads = 0;
  c.expand_v = 1;
  c.rule = "hgrn2";
  c.conv_size = 0;
  c.feature_map = "silu";
  c.decay_gate = "bounded";
  c.output_gate = "none";
  c.output_norm = "width";
  c.output_norm_eps = kHgrn2NormEps;
}
void write_hgrn2(const ModelConfig& c, Json& json) {
  write_common(c, json);
  json.update({{"expand_ratio", c.head_dim}, {"use_lower_bound", true}, {"use_short_conv", false}});
}

constexpr double kRetnetTheta = 10000.0;

void read_retnet(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 2);
  read_shares(keys, c, 8, 1.0, 2.0);
  read_plain(keys, c);
  c.rule = "retnet";
  c.rope_theta = kRetnetTheta;
}

void read_transformer(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  c.layers = {read_attention_kind(keys, c)};
}
void write_transformer(const ModelConfig& c, Json& json) {
  write_common(c, json);
  write_attention(c, c.layer_kind(0), json);
}

// The first that says the same as a model of our own is what it is exported as.
constexpr Type kTypes[] = {
    {"transformer", read_transformer, write_transformer},
    {"delta_net", read_delta_net, write_delta_net},
    {"gated_deltanet", read_gated_deltanet, write_gated},
    {"comba", read_comba, write_comba},
    {"kda", read_kda, write_kda},
    {"gdn2", read_gdn2, write_gdn2},
    {"precond_gated_deltanet", read_precond_gated, write_precond_gated},
    {"precond_kda", read_precond_kda, write_precond_kda, {{{"a_atk_proj", "a_proj"}}}},
    {"linear_attn", read_linear_attn, write_linear_attn, {{{"o_norm", "norm"}}}},
    {"gla", read_gla, write_plain, {{{"o_norm", "g_norm_swish_gate"}, {"f_proj", "gk_proj"}}}},
    {"hgrn2", read_hgrn2, write_hgrn2, {{{"o_norm", "g_norm"}, {"v_proj", "i_proj"}}}},
    {"retnet", read_retnet, write_plain, {{{"o_norm", "g_norm_swish_gate"}}}},
};

// The type's name: model_type, or that of a mixer in its place.
std::string type_name(const Json& config) {
  const auto text = [](const Json& json, const char* key) {
    const auto it = json.find(key);
    return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  const auto mixer = config.find("mixer_override");
  if (mixer != config.end() && mixer->is_object()) return text(*mixer, "type");
  return text(config, "model_type");
}

const Type* find_type(const std::string& name) {
  for (const Type& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

// The keys of a recurrence where there is none, and of attention where there is none, say nothing.
ModelConfig meaning_of_layers(ModelConfig c) {
  const ModelConfig standard;
  StringList kinds;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) kinds.push_back(c.layer_rule(i) == c.rule ? "recurrent" : c.layer_rule(i));
  const auto resolve = [&](AttentionKeys& keys) {
    const AttentionSpec spec = c.attention_spec(keys, 0);
    keys.num_heads = spec.heads;
    keys.num_kv_heads = spec.kv_heads;
    keys.head_dim = spec.head_dim;
  };
  if (c.has(LayerKind::kAttention)) resolve(c.attention);
  if (c.has(LayerKind::kWindow)) resolve(c.window);
  static_cast<MixerKeys&>(c) = c.used_mixers();
  if (!c.has_recurrence()) {
    ModelConfig plain;
    plain.layers = c.layers;
    plain.mlp = c.mlp;
    static_cast<MixerKeys&>(plain) = c;
    plain.vocab_size = c.vocab_size;
    plain.hidden_size = c.hidden_size;
    plain.num_hidden_layers = c.num_hidden_layers;
    plain.intermediate_size = c.intermediate_size;
    plain.hidden_ratio = c.hidden_ratio;
    plain.norm_eps = c.norm_eps;
    plain.tie_word_embeddings = c.tie_word_embeddings;
    c = plain;
  }
  kinds.resize(period(kinds));
  c.layers = kinds == StringList{"recurrent"} ? StringList{} : kinds;
  return c;
}

// What a configuration says, whichever way it says it: two models with equal ones compute the same.
ModelConfig meaning(ModelConfig c) {
  c = meaning_of_layers(std::move(c));
  const Rule rule = c.resolved_rule();
  c.intermediate_size = c.mlp_size();
  c.hidden_ratio = ModelConfig().hidden_ratio;
  c.num_v_heads = c.v_heads();
  c.expand_v = static_cast<double>(c.head_v_dim()) / static_cast<double>(c.head_dim);
  if (!rule.uses_precond()) c.precond_x = ModelConfig().precond_x;
  if (c.output_norm_eps == c.norm_eps) c.output_norm_eps = 0;
  // A decay of every value head is one of every key head where they are as many.
  if (c.num_v_heads == c.num_heads) c.decay_per_value_head = false;
  Rule plain = rule;
  if (!rule.uses_precond()) plain.precond_x = Rule().precond_x;
  c.rule = to_string(plain);
  c.allow_neg_eigval = false;
  c.init.clear();
  c.peer.clear();
  return c;
}

struct Difference {
  std::string key;
  Json ours, theirs;
};

std::vector<Difference> differences_of(const ModelConfig& ours, const ModelConfig& theirs) {
  ModelConfig a_copy = ours, b_copy = theirs;
  Json a = Json::object(), b = Json::object();
  keys_to_json(key_tables(a_copy), a);
  keys_to_json(key_tables(b_copy), b);
  std::vector<Difference> list;
  const auto compare = [&](const std::string& prefix, const Json& x, const Json& y) {
    for (const auto& [key, value] : x.items()) {
      if (!value.is_object() && value != y.at(key)) list.push_back({prefix + key, value, y.at(key)});
    }
  };
  compare("", a, b);
  for (const auto& [table, keys] : a.at("mixer").items()) compare("mixer." + table + ".", keys, b.at("mixer").at(table));
  return list;
}

std::string differences(const ModelConfig& ours, const ModelConfig& theirs) {
  std::string text;
  for (const Difference& d : differences_of(ours, theirs)) {
    text += fmt::format("{}{} = {} (here {})", text.empty() ? "" : ", ", d.key, d.theirs.dump(), d.ours.dump());
  }
  return text;
}

// Axes and numbers that one rule has and the other has not.
size_t rule_distance(const ModelConfig& ours, const ModelConfig& theirs) {
  const auto words = [](const std::string& rule) {
    std::set<std::string> all;
    std::istringstream in(rule);
    for (std::string word; in >> word;) all.insert(word);
    return all;
  };
  const std::set<std::string> a = words(ours.rule), b = words(theirs.rule);
  std::vector<std::string> either;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(either));
  return either.size();
}

// An axis of the rule, and the list of layers, weigh more than all other keys.
constexpr size_t kStructure = 1000;

size_t count_differences(const ModelConfig& ours, const ModelConfig& theirs) {
  size_t n = 0;
  for (const Difference& d : differences_of(ours, theirs)) n += d.key == "layers" ? kStructure : 1;
  return n;
}

// What a type's model would be that is as much like a configuration as the type allows.
struct Candidate {
  const Type* type = nullptr;
  Json json;           // the type's configuration
  ModelConfig theirs;  // its meaning
  size_t distance = 0;
};

// The types that have these sizes, the nearest first; `obstacle`: what the first of the others said against it.
std::vector<Candidate> candidates(const ModelConfig& config, std::string& obstacle) {
  const ModelConfig ours = meaning(config);
  std::vector<Candidate> all;
  for (const Type& type : kTypes) {
    Candidate candidate{&type, {{"model_type", type.name}}, {}, 0};
    type.write(config, candidate.json);
    if (candidate.json["model_type"] != "transformer") write_hybrid(config, candidate.json);
    try {
      candidate.theirs = meaning(config_from_peer(candidate.json, type.name));
    } catch (const Error& error) {
      if (obstacle.empty()) obstacle = error.what();
      continue;
    }
    // A rule that is called as a type is nearest to it, however its layer computes it.
    const size_t axes = config.rule == type.name ? 0 : rule_distance(ours, candidate.theirs);
    candidate.distance = kStructure * axes + count_differences(ours, candidate.theirs);
    all.push_back(std::move(candidate));
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.distance < b.distance; });
  return all;
}

}  // namespace

bool is_peer_config(const Json& config) {
  const auto it = config.is_object() ? config.find("model_type") : config.end();
  return config.is_object() && it != config.end() && it->is_string() && *it != kOurs;
}

std::string unknown_peer_model(const Json& config) {
  const std::string name = type_name(config);
  if (name.empty()) return "a mixer without a type";
  // The one mixer that takes another's place, and only there.
  const auto mixer = config.find("mixer_override");
  const bool replaced = mixer != config.end() && !mixer->is_null();
  if (find_type(name) == nullptr || replaced != (name == "gdn2")) return replaced ? name + " as mixer" : name;
  return "";
}

ModelConfig config_from_peer(const Json& config, const std::string& where) {
  if (!is_peer_config(config))
    fail_usage("{}: model_type: expected one of flash-linear-attention, got {}", where,
               shown(config.is_object() ? config.value("model_type", Json()) : config));
  if (const std::string unknown = unknown_peer_model(config); !unknown.empty()) {
    std::string known;
    for (const Type& type : kTypes) known += fmt::format("{}{}", known.empty() ? "" : ", ", type.name);
    fail_usage("{}: model_type: expected one of {}, got {}", where, known, unknown);
  }
  const Keys keys(config, where);
  ModelConfig c;
  find_type(type_name(config))->read(keys, c);
  if (c.layers.empty()) read_hybrid(keys, c);
  c.peer = Json{{"config", config}}.dump(-1, ' ', false, Json::error_handler_t::replace);
  try {
    validate(c);
  } catch (const Error& error) {
    throw Error(error.kind(), where + ": " + error.what());
  }
  return c;
}

Json config_to_peer(const ModelConfig& config) {
  validate(config);
  const ModelConfig ours = meaning(config);
  if (!config.peer.empty()) {
    const Json peer = Json::parse(config.peer);
    const auto it = peer.find("config");
    if (it == peer.end()) fail_usage("config.json: peer: expected a key 'config', as 'fastweight import' writes it, got {}", shown(peer));
    const ModelConfig theirs = meaning(config_from_peer(*it, "config.json: peer.config"));
    if (ours == theirs) return *it;
    fail_usage("config.json: peer.config no longer says what the keys beside it say: {}; remove the key 'peer' to export it as it is now",
               differences(ours, theirs));
  }
  std::string obstacle;
  const std::vector<Candidate> types = candidates(config, obstacle);
  for (const Candidate& type : types) {
    if (ours == type.theirs) return type.json;
  }
  fail_usage("flash-linear-attention has no model that computes this; its nearest is {}, which wants {}", types.empty() ? "none" : types.front().type->name,
             types.empty() ? obstacle : differences(ours, types.front().theirs));
}

PeerLayout peer_layout(const ModelConfig& wanted, const std::vector<std::string>& fixed) {
  validate(wanted);
  const ModelConfig ours = meaning(wanted);
  std::string obstacle;
  const std::vector<Candidate> types = candidates(wanted, obstacle);
  if (types.empty()) fail_usage("layout fla: flash-linear-attention has no model of these sizes: {}", obstacle);
  const auto same_rule =
      std::find_if(types.begin(), types.end(), [&](const Candidate& type) { return type.theirs.rule == ours.rule && type.theirs.layers == ours.layers; });
  if (same_rule == types.end()) {
    fail_usage(
        "layout fla: flash-linear-attention has no layer that computes the rule '{}'; its nearest is {}, which wants {}. Give that, or train without "
        "the layout and without an export{}",
        wanted.rule, types.front().type->name, differences(ours, types.front().theirs),
        obstacle.empty() ? "" : fmt::format(" (not of these sizes: {})", obstacle));
  }
  PeerLayout layout{same_rule->type->name, wanted, {}};
  Json json = config_to_json(wanted);
  for (const Difference& d : differences_of(ours, same_rule->theirs)) {
    if (std::find(fixed.begin(), fixed.end(), d.key) != fixed.end()) {
      fail_usage("layout fla: {} wants {} = {}, but {} was given: leave {} out, or train without the layout", layout.type, d.key, d.theirs.dump(),
                 d.ours.dump(), d.key);
    }
    layout.changes.push_back(fmt::format("{} = {} (else {})", d.key, d.theirs.dump(), d.ours.dump()));
    std::string place = "/" + d.key;
    std::replace(place.begin(), place.end(), '.', '/');
    json[Json::json_pointer(place)] = d.theirs;
  }
  layout.config = config_from_json(json, "layout fla");
  config_to_peer(layout.config);  // says what is missing, should a key not be enough
  return layout;
}

std::string peer_parameter_name(const Json& peer_config, const std::string& name) {
  const Type* type = find_type(type_name(peer_config));
  if (type == nullptr) return name;
  std::string result = "." + name + ".";
  for (const Rename& rename : type->renames) {
    if (rename.ours == nullptr) continue;
    const std::string ours = fmt::format(".attn.{}.", rename.ours);
    const size_t at = result.find(ours);
    if (at != std::string::npos) result.replace(at, ours.size(), fmt::format(".attn.{}.", rename.theirs));
  }
  // The norm that is not fused with a gate.
  if (const size_t at = result.find(".g_norm_swish_gate."); at != std::string::npos && !peer_config.value("use_output_gate", true)) {
    result.replace(at, 19, ".g_norm.");
  }
  return result.substr(1, result.size() - 2);
}

}  // namespace fw
