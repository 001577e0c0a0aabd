#include "model/interop/hf_parts.h"

#include <algorithm>

namespace fw::hf {
namespace {

constexpr int64_t kSwigluStep = 256;  // of which FLA's width of an MLP is a multiple

}  // namespace

int64_t swiglu_width(const Keys& keys, int64_t hidden, double ratio) {
  const double width = static_cast<double>(hidden) * ratio * 2 / 3;
  if (!(width >= 0 && width < 1e15))
    fail_usage("{}: hidden_ratio: expected a number that makes the MLP 0 to 1e15 wide, got {}", keys.where(), width);
  return kSwigluStep * ((static_cast<int64_t>(width) + kSwigluStep - 1) / kSwigluStep);
}

// What all of them have.
void read_common(const Keys& keys, ModelConfig& c, int64_t hidden, int64_t layers, double ratio) {
  c.vocab_size = keys.whole("vocab_size", 32000);
  c.hidden_size = keys.whole("hidden_size", hidden);
  c.num_hidden_layers = keys.whole("num_hidden_layers", layers);
  c.norm_eps = keys.number(keys.spelling(kNormEps), 1e-6);
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", false);
  c.init = "normal";
  c.intermediate_size = keys.whole("intermediate_size", 0);
  const double share = keys.number("hidden_ratio", ratio);  // says nothing beside the width
  if (c.intermediate_size == 0) c.intermediate_size = swiglu_width(keys, c.hidden_size, share);
  keys.must_be_one_of("hidden_act", kSilu);
  keys.must_be("elementwise_affine", true);
  keys.must_be_absent("attnres_block_size");
}

void read_heads(const Keys& keys, ModelConfig& c, int64_t heads, int64_t head_dim, double expand_v) {
  c.num_heads = keys.whole("num_heads", heads);
  c.num_v_heads = keys.whole("num_v_heads", 0);
  c.head_dim = keys.whole("head_dim", head_dim);
  c.expand_v = keys.number("expand_v", expand_v);
  // Before anything is computed with them; validate() has the exact limits.
  if (c.head_dim < 1 || c.head_dim > 1 << 20)
    fail_usage("{}: head_dim: expected 1 to 4096, got {}", keys.where(), c.head_dim);
  if (!(c.expand_v > 0 && c.expand_v <= 65536))
    fail_usage("{}: expand_v: expected a number from 0 to 65536, got {}", keys.where(), c.expand_v);
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
    fail_usage("{}: expand_k, expand_v: expected widths of keys and values that {} heads divide, got {} and {}",
               keys.where(), c.num_heads, key_size, value_size);
  }
  c.head_dim = key_size / c.num_heads;
  c.expand_v = static_cast<double>(value_size) / static_cast<double>(key_size);
  keys.must_agree("num_kv_heads", c.num_heads, "num_heads (grouped keys are not computed here)");
}

// Models of state-space layers, each block one layer.
void read_blocks(const Keys& keys, ModelConfig& c, const BlockDefaults& standard,
                 std::initializer_list<const char*> activations) {
  c.vocab_size = keys.whole("vocab_size", standard.vocab);
  c.hidden_size = keys.whole(keys.spelling({"hidden_size", "d_model"}), standard.hidden);
  c.num_hidden_layers = keys.whole(keys.spelling({"num_hidden_layers", "n_layer"}), standard.layers);
  c.norm_eps = keys.number(keys.spelling(kNormEps), 1e-5);
  c.tie_word_embeddings = keys.truth("tie_word_embeddings", standard.tied);
  c.init = "normal";
  c.mlp = "none";
  keys.must_be_one_of("hidden_act", activations);
  if (c.hidden_size < 1 || c.hidden_size > 1 << 24)
    fail_usage("{}: hidden_size: expected 1 to 2^24, got {}", keys.where(), c.hidden_size);
}

// First values and the type of the residual stream, as both programs spell them.
void skip_first_values(const Keys& keys) {
  keys.have_no_effect({"dt_min", "dt_max", "dt_init_floor", "dt_scale", "dt_init_scheme", "time_step_min",
                       "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme",
                       "rescale_prenorm_residual", "residual_in_fp32", "fused_add_norm", "chunk_size",
                       "pad_vocab_size_multiple"});
}

// Which program wrote a configuration of mamba or mamba2. The keys that only one of them writes tell; where both or
// none are there, a default that differs between the programs is an error.
BlockDefaults block_defaults(const Keys& keys, const BlockDefaults& fla, const BlockDefaults& transformers) {
  const auto any = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return keys.has(name); });
  };
  const bool theirs = any(
      {"layer_norm_epsilon", "time_step_rank", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor"});
  const bool flas = any({"norm_eps", "dt_rank", "dt_limit", "dt_min", "dt_max", "dt_init_floor", "fuse_norm",
                         "use_l2warp", "fuse_cross_entropy"});
  if (theirs && flas) {
    const auto need = [&](const char* key, bool differs) {
      if (differs && !keys.has(key)) {
        fail_usage(
            "{}: {}: expected a value, as keys of two programs are here (flash-linear-attention and transformers) "
            "whose defaults differ, got none",
            keys.where(), key);
      }
    };
    need("hidden_size", fla.hidden != transformers.hidden);
    need("num_hidden_layers", fla.layers != transformers.layers);
    need("vocab_size", fla.vocab != transformers.vocab);
    need("tie_word_embeddings", fla.tied != transformers.tied);
    need("n_groups", fla.groups != transformers.groups);
  }
  return theirs && !flas ? transformers : fla;
}

// [0, Infinity], as transformers writes it: every time step is let through.
void read_limit(const Keys& keys, const char* key) {
  const Json* limit = keys.find(key);
  const Json any = {0.0, {{"__float__", "Infinity"}}};
  if (limit != nullptr && *limit != any) keys.fail(key, "0 to infinity (nothing else is computed here)", *limit);
}

// The base of the rotary embedding: rope_theta, or rope_parameters as transformers has it.
double read_theta(const Keys& keys) {
  double theta = keys.number("rope_theta", kTheta);
  keys.must_be("partial_rotary_factor", 1.0);
  keys.must_be_absent("rope_scaling");
  if (!keys.has("rope_parameters")) return theta;
  if (!keys.find("rope_parameters")->is_object())
    keys.fail("rope_parameters", "an object", *keys.find("rope_parameters"));
  const Keys inner = keys.inner("rope_parameters");
  const double other = inner.number("rope_theta", theta);
  if (keys.has("rope_theta") && other != theta)
    inner.fail("rope_theta", fmt::format("{} as rope_theta beside it says", theta), *inner.find("rope_theta"));
  inner.must_be(inner.spelling({"rope_type", "type"}), "default");
  inner.must_be("partial_rotary_factor", 1.0);
  inner.finish();
  return other;
}

// One attention layer, of a whole model or of the layers that `attn` names. Its heads are hidden_size / num_heads wide.
void read_attention(const Keys& keys, ModelConfig& c, AttentionKeys& a) {
  a.num_heads = keys.whole("num_heads", 32);
  if (a.num_heads < 1 || a.num_heads > 1 << 16)
    fail_usage("{}: num_heads: expected 1 to 65536, got {}", keys.where(), a.num_heads);
  if (c.hidden_size % a.num_heads != 0)
    fail_usage("{}: num_heads: expected a number that divides hidden_size = {}, got {}", keys.where(), c.hidden_size,
               a.num_heads);
  a.num_kv_heads = keys.whole("num_kv_heads", a.num_heads);
  a.head_dim = c.hidden_size / a.num_heads;
  a.rope_theta = read_theta(keys);
  a.qkv_bias = keys.truth("qkv_bias", false);
}
// The kind of those layers: with a window or without.
const char* read_attention_kind(const Keys& keys, ModelConfig& c) {
  const bool all = keys.find("window_size") == nullptr;
  if (!all) c.window.window = keys.whole("window_size", 0);
  read_attention(keys, c, all ? c.attention : c.window);
  return all ? "attention" : "window";
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
void read_conv(const Keys& keys, ModelConfig& c) {
  keys.must_be("use_short_conv", true);  // without it FLA still applies the activation
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

void write_blocks(const ModelConfig& c, Json& json) {
  json.update({{"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"num_hidden_layers", c.num_hidden_layers},
               {"norm_eps", c.norm_eps},
               {"tie_word_embeddings", c.tie_word_embeddings},
               {"hidden_act", "silu"}});
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

}  // namespace fw::hf
