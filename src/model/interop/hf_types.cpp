#include "model/interop/hf_types.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "model/interop/hf_experts.h"
#include "model/interop/hf_hybrids.h"
#include "model/interop/hf_parts.h"

namespace fw::hf {
namespace {

bool doubles(const ModelConfig& c) { return c.resolved_rule().gain_bound > 1.0; }

// ---- the types

void read_delta_net(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_shares(keys, c, 16, 1.0, 1.0);
  read_conv(keys, c);
  keys.must_be("qk_norm", "l2");
  keys.must_be_one_of("qk_activation", kSilu);
  keys.must_be("use_output_norm", true);
  keys.must_be("use_beta", true);
  c.rule = "deltanet";
  c.allow_neg_eigval = keys.truth("allow_neg_eigval", false);
  c.output_gate = keys.truth("use_gate", false) ? "silu" : "none";
}
void write_delta_net(const ModelConfig& c, Json& json) {
  write_shares(c, json);
  json.update({{"use_short_conv", true},
               {"conv_size", c.conv_size},
               {"qk_norm", "l2"},
               {"qk_activation", "silu"},
               {"use_beta", true},
               {"use_output_norm", true}});
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
  json["use_gate"] = c.output_gate != "none";
}
void read_gated_deltanet(const Keys& keys, ModelConfig& c) {
  read_gated(keys, c, "gated_deltanet");
  keys.must_be_one_of("output_gate_activation", {"swish", "silu", "sigmoid"});
  if (c.output_gate != "none" && keys.text("output_gate_activation", "swish") == "sigmoid") c.output_gate = "sigmoid";
}
void write_gated_deltanet(const ModelConfig& c, Json& json) {
  write_gated(c, json);
  if (c.output_gate == "sigmoid") json["output_gate_activation"] = "sigmoid";
}

void read_precond(const Keys& keys, ModelConfig& c) {
  c.precond_x = keys.number("squash_x", 1.5);
  keys.must_be("squash_eps", 1e-6);
  keys.have_no_effect({"log_atk_scale_init", "a_log_init_lower"});  // first values
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

// FLA has this layer but no model of it: the model of kda with its mixers replaced.
void read_gdn2(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_conv(keys, c);
  // Of the mixers that are replaced.
  keys.have_no_effect(
      {"num_heads", "num_v_heads", "head_dim", "expand_v", "allow_neg_eigval", "safe_gate", "lower_bound"});
  const Keys mixer = keys.inner("mixer_override");
  mixer.have_no_effect({"type"});
  read_heads(mixer, c, 16, 128, 1.0);
  mixer.must_be("use_short_conv", true);
  c.conv_size = mixer.whole("conv_size", c.conv_size);
  c.allow_neg_eigval = mixer.truth("allow_neg_eigval", false);
  mixer.finish();
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
  json["feature_map"] = c.feature_map == "product" ? "elementwise_product"
                        : c.feature_map == "none"  ? "identity"
                                                   : c.feature_map;
}

// p = sigmoid(decay) k is the erase key. The kernel normalises it, which cancels the inner decay (but for the norm's
// epsilon) in what is erased; it remains in q - D p.
void read_comba(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 21, 4);
  read_heads(keys, c, 6, 256, 2.0);
  read_conv(keys, c);
  if (c.v_heads() != c.num_heads)
    keys.fail("num_v_heads", fmt::format("num_heads = {} (FLA itself fails with others)", c.num_heads), c.num_v_heads);
  c.rule = "decay=scalar gain=gate q_norm=l2 k_norm=l2 erase_key=own erase_state=previous";
  keys.have_no_effect({"correction_factor"});  // the first value of D
  // FLA's model hands neither to its layer, which does both.
  keys.must_be("use_inner_decay", true);
  keys.must_be("use_output_correction", true);
  c.raw_read_correction = true;
  c.output_gate = keys.truth("use_output_gate", true) ? "sigmoid" : "none";
}
void write_comba(const ModelConfig& c, Json& json) {
  write_heads(c, json);
  json["use_inner_decay"] = json["use_output_correction"] = true;
  json["use_output_gate"] = c.output_gate == "sigmoid";
}

// What gla and retnet have in common. The width of a convolution says nothing where there is none.
void read_plain(const Keys& keys, ModelConfig& c) {
  keys.must_be("conv_bias", false);
  const int64_t width = keys.whole("conv_size", 4);
  c.conv_size = keys.truth("use_short_conv", false) ? width : 0;
  const std::string map = keys.text("feature_map", "none");
  if (map != "none" && map != "relu") keys.fail("feature_map", "null or relu", map);
  c.feature_map = map;
  keys.must_be("fuse_norm", true);  // without it FLA names the norm otherwise
  c.output_gate = keys.truth("use_output_gate", true) ? "silu" : "none";
}
void write_plain(const ModelConfig& c, Json& json) {
  write_shares(c, json);
  json["use_short_conv"] = c.conv_size > 0;
  if (c.conv_size > 0) json["conv_size"] = c.conv_size;
  if (c.feature_map != "none") json["feature_map"] = c.feature_map;
  json["use_output_gate"] = c.output_gate == "silu";
}

constexpr int64_t kGlaRank = 16;  // FLA's model leaves it at its layer's default

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
  keys.have_no_effect({"conv_size"});
  const Json* ratio = keys.find("expand_ratio");
  c.head_dim = ratio != nullptr || keys.find("num_heads") == nullptr ? keys.whole("expand_ratio", 128) : 0;
  c.num_heads = keys.whole("num_heads", c.head_dim > 0 ? c.hidden_size / c.head_dim : 0);
  if (c.num_heads < 1) fail_usage("{}: num_heads: expected at least 1, got {}", keys.where(), c.num_heads);
  if (c.head_dim == 0) c.head_dim = c.hidden_size / c.num_heads;
  if (c.num_heads > 1 << 16 || c.head_dim < 1 || c.head_dim > 4096 || c.num_heads * c.head_dim != c.hidden_size) {
    fail_usage(
        "{}: expand_ratio: expected num_heads * expand_ratio = hidden_size = {} (the lower bounds are as wide), got {} "
        "* {}",
        keys.where(), c.hidden_size, c.num_heads, c.head_dim);
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

// FLA's model hands neither use_short_conv nor a rotary base to its layer.
void read_retnet(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 2);
  read_shares(keys, c, 8, 1.0, 2.0);
  keys.must_be("use_short_conv", false);
  keys.must_be("rope_theta", kTheta);
  read_plain(keys, c);
  c.rule = "retnet";
  c.rope_theta = kTheta;
}
void write_retnet(const ModelConfig& c, Json& json) {
  write_plain(c, json);
  json["use_short_conv"] = false;
}

void read_transformer(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  c.layers = {read_attention_kind(keys, c)};
  (c.layers[0] == "window" ? c.window : c.attention).qk_norm = keys.truth("qk_norm", false);
}
void write_transformer(const ModelConfig& c, Json& json) {
  write_common(c, json);
  write_attention(c, c.layer_kind(0), json);
}

// The width inside a state-space layer, which follows from others.
void read_inner(const Keys& keys, int64_t width) {
  for (const char* key : {"intermediate_size", "d_inner"}) keys.must_agree(key, width, "expand * hidden_size");
}

// Mamba-2: blocks of one layer without MLP.
void read_mamba2(const Keys& keys, ModelConfig& c) {
  const BlockDefaults standard = block_defaults(keys, {}, {32768, 4096, 64, false, 8, true});
  read_blocks(keys, c, standard);
  skip_first_values(keys);
  keys.have_no_effect({"time_step_rank", "A_init_range", "conv_init"});  // the layer has a time step a head and no rank
  c.layers = {"ssd"};
  c.ssd.expand = keys.whole("expand", 2);
  c.ssd.head_dim = keys.whole("head_dim", 64);
  c.ssd.state_size = keys.whole("state_size", 128);
  c.ssd.num_groups = keys.whole("n_groups", standard.groups);
  c.ssd.conv_size = keys.whole("conv_kernel", 4);
  if (c.ssd.expand < 1 || c.ssd.expand > 64)
    fail_usage("{}: expand: expected 1 to 64, got {}", keys.where(), c.ssd.expand);
  if (c.ssd.head_dim > 0)
    keys.must_agree("num_heads", c.ssd.expand * c.hidden_size / c.ssd.head_dim, "expand * hidden_size / head_dim");
  read_inner(keys, c.ssd.expand * c.hidden_size);
  keys.must_be("use_conv_bias", true);
  keys.must_be("use_bias", false);
  keys.must_be(keys.spelling({"rmsnorm", "rms_norm"}), true);
  if (standard.transformers) {
    // published configurations have it as true, and transformers' layer gates before the norm all the same
    keys.have_no_effect({"norm_before_gate"});
  } else {
    keys.must_be("norm_before_gate", false);
  }
  keys.must_be("D_has_hdim", false);
  read_limit(keys, "dt_limit");
  read_limit(keys, "time_step_limit");
}
void write_mamba2(const ModelConfig& c, Json& json) {
  write_blocks(c, json);
  const SsdSpec spec = c.ssd_spec();
  json.update({{"expand", c.ssd.expand},
               {"head_dim", spec.head_dim},
               {"num_heads", spec.heads},
               {"state_size", spec.state},
               {"n_groups", spec.groups},
               {"conv_kernel", spec.conv_size},
               {"use_conv_bias", true},
               {"use_bias", false},
               {"rmsnorm", true},
               {"norm_before_gate", false},
               {"D_has_hdim", false}});
}

constexpr int64_t kWidthPerRank = 16;  // of "auto"

// The layer of Mamba (1), alone or in Samba. The rank of the step has two names; "auto" is a number too.
void read_mamba_layer(const Keys& keys, ModelConfig& c) {
  c.mamba.expand = keys.whole("expand", 2);
  c.mamba.state_size = keys.whole("state_size", 16);
  c.mamba.conv_size = keys.whole("conv_kernel", 4);
  for (const char* name : {"dt_rank", "time_step_rank"}) {
    const Json* given = keys.find(name);
    if (given == nullptr) continue;
    const int64_t rank = *given == "auto" ? (c.hidden_size + kWidthPerRank - 1) / kWidthPerRank : keys.whole(name, 0);
    if (rank < 1) keys.fail(name, "at least 1", *given);
    if (c.mamba.dt_rank > 0 && rank != c.mamba.dt_rank)
      keys.fail(name, fmt::format("{} as dt_rank, which is another name of it, says", c.mamba.dt_rank), *given);
    c.mamba.dt_rank = rank;
  }
  if (c.mamba.expand < 1 || c.mamba.expand > 64)
    fail_usage("{}: expand: expected 1 to 64, got {}", keys.where(), c.mamba.expand);
  read_inner(keys, c.mamba.expand * c.hidden_size);
  skip_first_values(keys);
  keys.have_no_effect({"use_mambapy", "use_associative_scan"});
  keys.must_be("use_conv_bias", true);
  keys.must_be("use_bias", false);
}
void write_mamba_layer(const ModelConfig& c, Json& json, const char* rank) {
  const SelectiveSpec spec = c.selective_spec(ScanLaw::kMamba);
  json.update({{"expand", c.mamba.expand},
               {"state_size", spec.state},
               {"conv_kernel", spec.conv_size},
               {"use_conv_bias", true},
               {"use_bias", false}});
  json["intermediate_size"] = spec.inner;
  json[rank] = spec.rank;
}

void read_mamba(const Keys& keys, ModelConfig& c) {
  read_blocks(keys, c, block_defaults(keys, {}, {50280, 768, 32, true}));
  c.layers = {"mamba"};
  read_mamba_layer(keys, c);
  // Left over by what turned a model of mamba_ssm into one of transformers.
  keys.must_be("rms_norm", true);
  const Json* layer = keys.find("ssm_cfg");
  if (layer != nullptr && !layer->empty())
    keys.fail("ssm_cfg", "{} (the keys beside it say what the layer is)", *layer);
}
void write_mamba(const ModelConfig& c, Json& json) {
  write_blocks(c, json);
  write_mamba_layer(c, json, "dt_rank");
}

// Samba: layers of Mamba and, where `attn` says, of attention with a window, a SwiGLU after each. Its
// intermediate_size is the width inside a layer of Mamba, not that of the SwiGLU, which follows from hidden_ratio.
void read_samba(const Keys& keys, ModelConfig& c) {
  read_blocks(keys, c, {32000, 2304, 18});
  c.mlp = "swiglu";
  c.intermediate_size = swiglu_width(keys, c.hidden_size, keys.number("hidden_ratio", 4));
  read_mamba_layer(keys, c);
  if (keys.find("attn") == nullptr) keys.fail("attn", "an object with layers and num_heads", Json());
  read_hybrid(keys, c, "mamba");
  keys.must_be_absent("attnres_block_size");
}
void write_samba(const ModelConfig& c, Json& json) {
  write_blocks(c, json);
  json["hidden_act"] = "swish";
  json["hidden_ratio"] = 1.5 * static_cast<double>(c.mlp_size()) / static_cast<double>(c.hidden_size);
  write_mamba_layer(c, json, "time_step_rank");
}

constexpr int64_t kMesaSteps = 30;  // FLA's default

// MesaNet, whose solve is exact here: FLA's conjugate gradients end near it.
void read_mesa_net(const Keys& keys, ModelConfig& c) {
  read_common(keys, c, 2048, 24, 4);
  read_conv(keys, c);
  read_hybrid(keys, c, "mesa");
  c.mesa.num_heads = keys.whole("num_heads", 16);
  c.mesa.head_dim = keys.whole("head_dim", 128);
  c.mesa.conv_size = c.conv_size;
  c.mesa.output_gate = keys.truth("use_output_gate", false) ? "silu" : "none";
  c.mesa.least_lambda = keys.number("lambda_lower_bound", 0.25);
  for (const char* key : {"max_cg_step_training", "max_cg_step_decoding"}) {
    const Json* steps = keys.find(key);
    if (keys.whole(key, kMesaSteps) < kMesaSteps)
      keys.fail(key, fmt::format("at least {} (the solve is exact here, which fewer steps are not near)", kMesaSteps),
                *steps);
  }
}
void write_mesa_net(const ModelConfig& c, Json& json) {
  write_common(c, json);
  const MesaSpec spec = c.mesa_spec();
  json.update({{"num_heads", spec.heads},
               {"head_dim", spec.dim},
               {"use_short_conv", true},
               {"conv_size", spec.conv_size},
               {"use_output_gate", spec.gate == GateKind::kSilu},
               {"lambda_lower_bound", spec.least_lambda}});
}

// RWKV-7. Without fused norms a key's norm has a floor in place of an epsilon. What FLA adds to the loss in
// training (use_l2warp) is not looked at.
constexpr double kFusedKeyEps = 1e-6;

void read_rwkv7(const Keys& keys, ModelConfig& c) {
  read_blocks(keys, c, {32000, 2048, 24}, {"sqrelu", "relu2"});
  c.layers = {"rwkv7"};
  c.norm = "layer";
  c.mlp = "channel_mix";
  c.embedding_norm = keys.truth("norm_first", true);
  keys.must_be("norm_bias", true);
  keys.must_be_absent("attn");
  c.hidden_ratio = keys.number("hidden_ratio", 4);
  c.intermediate_size = keys.whole("intermediate_size", 0);
  if (keys.find("head_dim") == nullptr && keys.find("num_heads") != nullptr) {
    const int64_t heads = keys.whole("num_heads", 0);
    if (heads < 1 || c.hidden_size % heads != 0) {
      fail_usage("{}: num_heads: expected a number that divides hidden_size = {}, got {}", keys.where(), c.hidden_size,
                 heads);
    }
    c.rwkv7.head_dim = c.hidden_size / heads;
  } else {
    c.rwkv7.head_dim = keys.whole("head_dim", 64);
    if (c.rwkv7.head_dim < 1) fail_usage("{}: head_dim: expected 1 to 1024, got {}", keys.where(), c.rwkv7.head_dim);
    keys.must_agree("num_heads", c.hidden_size / c.rwkv7.head_dim, "hidden_size / head_dim");
  }
  c.rwkv7.decay_rank = keys.whole("decay_low_rank_dim", 0);
  c.rwkv7.rate_rank = keys.whole("a_low_rank_dim", 0);
  c.rwkv7.value_rank = keys.whole("v_low_rank_dim", 0);
  c.rwkv7.gate_rank = keys.whole("gate_low_rank_dim", 0);
  c.rwkv7.key_eps = keys.truth("fuse_norm", true) ? kFusedKeyEps : 0;
  if (const Json* widths = keys.find("value_dim"); widths != nullptr) {
    const bool one = widths->is_number_integer() && *widths == c.hidden_size;
    const bool all = widths->is_array() && std::all_of(widths->begin(), widths->end(),
                                                       [&](const Json& width) { return width == c.hidden_size; });
    if (!one && !all)
      keys.fail("value_dim",
                fmt::format("hidden_size = {} in every layer (nothing else is computed here)", c.hidden_size), *widths);
  }
}
void write_rwkv7(const ModelConfig& c, Json& json) {
  write_blocks(c, json);
  const Rwkv7Spec spec = c.rwkv7_spec(0);
  json.update({{"hidden_act", "sqrelu"},
               {"intermediate_size", c.mlp_size()},
               {"head_dim", spec.dim},
               {"num_heads", spec.heads()},
               {"decay_low_rank_dim", spec.decay_rank},
               {"a_low_rank_dim", spec.rate_rank},
               {"v_low_rank_dim", spec.value_rank},
               {"gate_low_rank_dim", spec.gate_rank},
               {"norm_first", c.embedding_norm},
               {"norm_bias", true},
               {"fuse_norm", spec.key_eps > 0},
               {"value_dim", std::vector<int64_t>(static_cast<size_t>(c.num_hidden_layers), c.hidden_size)}});
}

// Mamba-3. Its MIMO kernels rotate halves, the others pairs. FLA's layer has the decay activation of its authors'
// program before June 2026; a_activation = heavy_tail names the later one.
void read_mamba3_layer(const Keys& keys, ModelConfig& c, const char* state, const char* head_dim, const char* groups) {
  c.mamba3.expand = keys.whole("expand", 2);
  c.mamba3.head_dim = keys.whole(head_dim, 64);
  c.mamba3.state_size = keys.whole(state, 128);
  c.mamba3.num_groups = keys.whole(groups, 1);
  const int64_t rank = keys.whole("mimo_rank", 4);  // says nothing of a layer without
  c.mamba3.mimo_rank = keys.truth("is_mimo", false) ? rank : 0;
  if (c.mamba3.expand < 1 || c.mamba3.expand > 64)
    fail_usage("{}: expand: expected 1 to 64, got {}", keys.where(), c.mamba3.expand);
  if (keys.truth("is_mimo", false) && c.mamba3.mimo_rank < 1)
    fail_usage("{}: mimo_rank: expected at least 1, got {}", keys.where(), c.mamba3.mimo_rank);
  c.mamba3.rope_fraction = keys.number("rope_fraction", 0.5);
  if (c.mamba3.rope_fraction != 0.5 && c.mamba3.rope_fraction != 1.0) {
    fail_usage("{}: rope_fraction: expected 0.5 or 1 (FLA has no other), got {}", keys.where(), c.mamba3.rope_fraction);
  }
  c.mamba3.decay_floor = keys.number("A_floor", 1e-4);
  c.mamba3.output_norm = keys.truth("is_outproj_norm", false);
  skip_first_values(keys);
}

void read_mamba3(const Keys& keys, ModelConfig& c) {
  read_blocks(keys, c, {});
  c.layers = {"mamba3"};
  read_mamba3_layer(keys, c, "state_size", "head_dim", "n_groups");
  if (c.mamba3.head_dim > 0)
    keys.must_agree("num_heads", c.mamba3.expand * c.hidden_size / c.mamba3.head_dim,
                    "expand * hidden_size / head_dim");
  read_inner(keys, c.mamba3.expand * c.hidden_size);
  const std::string activation = keys.text("a_activation", "softplus");
  if (activation != "softplus" && activation != "heavy_tail")
    keys.fail("a_activation", "softplus or heavy_tail", activation);
  c.mamba3.decay_activation = activation;
  keys.must_be("use_bias", false);
}
void write_mamba3(const ModelConfig& c, Json& json) {
  write_blocks(c, json);
  const Mamba3Spec spec = c.mamba3_spec();
  json.update({{"expand", c.mamba3.expand},
               {"head_dim", spec.head_dim},
               {"num_heads", spec.heads},
               {"state_size", spec.state},
               {"n_groups", spec.groups},
               {"is_mimo", spec.mimo_rank > 0},
               {"rope_fraction", c.mamba3.rope_fraction},
               {"A_floor", spec.decay.floor},
               {"is_outproj_norm", spec.output_norm},
               {"use_bias", false}});
  if (spec.mimo_rank > 0) json["mimo_rank"] = spec.mimo_rank;
  if (spec.decay.heavy_tail) json["a_activation"] = "heavy_tail";
}

// state-spaces/mamba's own models (MambaConfig), of Mamba-3 only: blocks with a gated MLP where d_intermediate is not
// 0, its width a multiple of 128, the vocabulary filled up. Its decay activation is the heavy tail, and the epsilon of
// all norms 1e-5, whatever the configuration says.
constexpr int64_t kGatedMlpStep = 128;
constexpr double kMambaSsmEps = 1e-5;

void read_mamba_ssm(const Keys& keys, ModelConfig& c) {
  const auto filled = [](int64_t n, int64_t step) { return (n + step - 1) / step * step; };
  c.hidden_size = keys.whole("d_model", 2560);
  c.num_hidden_layers = keys.whole("n_layer", 64);
  c.vocab_size = keys.whole("vocab_size", 50277);
  const int64_t step = keys.whole("pad_vocab_size_multiple", 8), width = keys.whole("d_intermediate", 0);
  for (const auto& [key, value] : {std::pair("d_model", c.hidden_size), std::pair("vocab_size", c.vocab_size),
                                   std::pair("pad_vocab_size_multiple", step)}) {
    if (value < 1 || value > 1 << 24) fail_usage("{}: {}: expected 1 to 2^24, got {}", keys.where(), key, value);
  }
  if (width < 0 || width > 1 << 24) fail_usage("{}: d_intermediate: expected 0 to 2^24, got {}", keys.where(), width);
  c.vocab_size = filled(c.vocab_size, step);
  c.mlp = width > 0 ? "swiglu" : "none";
  if (width > 0) c.intermediate_size = filled(width, kGatedMlpStep);
  c.tie_word_embeddings = keys.truth("tie_embeddings", true);
  c.norm_eps = kMambaSsmEps;
  c.init = "normal";
  keys.must_be("rms_norm", true);
  keys.have_no_effect({"residual_in_fp32", "fused_add_norm", "attn_cfg"});  // the last of layers that are not there
  const Json* attention = keys.find("attn_layer_idx");
  if (attention != nullptr && *attention != Json::array())
    keys.fail("attn_layer_idx", "[] (its attention is not computed here)", *attention);

  const Json* layer = keys.find("ssm_cfg");
  if (layer == nullptr || !layer->is_object())
    keys.fail("ssm_cfg", "an object with layer = \"Mamba3\"", layer == nullptr ? Json() : *layer);
  const Keys mixer = keys.inner("ssm_cfg");
  if (mixer.text("layer", "Mamba1") != "Mamba3")
    mixer.fail("layer", "\"Mamba3\" (of the others flash-linear-attention's models are read)",
               mixer.text("layer", "Mamba1"));
  c.layers = {"mamba3"};
  read_mamba3_layer(mixer, c, "d_state", "headdim", "ngroups");
  c.mamba3.decay_activation = "heavy_tail";
  mixer.finish();
}
void write_mamba_ssm(const ModelConfig& c, Json& json) {
  const Mamba3Spec spec = c.mamba3_spec();
  Json layer = {{"layer", "Mamba3"},
                {"d_state", spec.state},
                {"expand", c.mamba3.expand},
                {"headdim", spec.head_dim},
                {"ngroups", spec.groups},
                {"rope_fraction", c.mamba3.rope_fraction},
                {"A_floor", spec.decay.floor},
                {"is_outproj_norm", spec.output_norm},
                {"is_mimo", spec.mimo_rank > 0}};
  if (spec.mimo_rank > 0) layer["mimo_rank"] = spec.mimo_rank;
  json = {{"d_model", c.hidden_size},
          {"d_intermediate", c.mlp_size()},
          {"n_layer", c.num_hidden_layers},
          {"vocab_size", c.vocab_size},
          {"ssm_cfg", layer},
          {"attn_layer_idx", Json::array()},
          {"attn_cfg", Json::object()},
          {"rms_norm", true},
          {"residual_in_fp32", true},
          {"fused_add_norm", true},
          {"pad_vocab_size_multiple", 1},
          {"tie_embeddings", c.tie_word_embeddings}};
}

constexpr Type kTypes[] = {
    {"transformer", read_transformer, write_transformer},
    {"delta_net", read_delta_net, write_delta_net},
    {"gated_deltanet", read_gated_deltanet, write_gated_deltanet},
    {"comba", read_comba, write_comba},
    {"kda", read_kda, write_kda},
    {"gdn2", read_gdn2, write_gdn2},
    {"precond_gated_deltanet", read_precond_gated, write_precond_gated},
    {"precond_kda", read_precond_kda, write_precond_kda, {{{"a_atk_proj", "a_proj"}}}},
    {"linear_attn", read_linear_attn, write_linear_attn, {{{"o_norm", "norm"}}}},
    {"gla", read_gla, write_plain, {{{"o_norm", "g_norm_swish_gate"}, {"f_proj", "gk_proj"}}}},
    {"hgrn2", read_hgrn2, write_hgrn2, {{{"o_norm", "g_norm"}, {"v_proj", "i_proj"}}}},
    {"mamba2", read_mamba2, write_mamba2, {}, "norm"},
    {"mamba", read_mamba, write_mamba, {}, "norm"},
    {"mamba3", read_mamba3, write_mamba3, {}, "norm"},
    {"mamba_ssm", read_mamba_ssm, write_mamba_ssm, {}, "norm", nullptr, true},
    {"samba", read_samba, write_samba, {}, "mixer_norm"},
    {"mesa_net", read_mesa_net, write_mesa_net},
    {"rwkv7", read_rwkv7, write_rwkv7, {}, nullptr, "ffn"},
    {"retnet", read_retnet, write_retnet, {{{"o_norm", "g_norm_swish_gate"}}}},
    {.name = "qwen3_5_text",
     .read = read_qwen3_5_text,
     .write = write_qwen3_5_text,
     .tensor = qwen3_5_tensor,
     .other_tensor = qwen3_5_nested_tensor,
     .aside = {"model.visual.", "mtp."}},
    {.name = "qwen3_5",
     .read = read_qwen3_5,
     .write = nullptr,
     .tensor = qwen3_5_tensor,
     .prefix = "model.language_model.",
     .aside = {"model.visual.", "mtp."}},
    {.name = "qwen3_5_moe_text",
     .read = read_qwen3_5_moe_text,
     .write = write_qwen3_5_moe_text,
     .tensor = qwen3_5_tensor,
     .other_tensor = qwen3_5_nested_tensor,
     .aside = {"model.visual.", "mtp."}},
    {.name = "qwen3_5_moe",
     .read = read_qwen3_5_moe,
     .write = nullptr,
     .tensor = qwen3_5_tensor,
     .prefix = "model.language_model.",
     .aside = {"model.visual.", "mtp."}},
    {.name = "qwen3_next",
     .read = read_qwen3_next,
     .write = write_qwen3_next,
     .tensor = qwen3_next_tensor,
     .aside = {"mtp."}},
    {.name = "kimi_linear",
     .read = read_kimi_linear,
     .write = write_kimi_linear,
     .tensor = kimi_linear_tensor,
     .other_tensor = kimi_linear_published_tensor},
    {.name = "olmo_hybrid",
     .read = read_olmo_hybrid,
     .write = write_olmo_hybrid,
     .tensor = olmo_hybrid_tensor,
     .other_tensor = olmo_hybrid_first_tensor},
};

}  // namespace

std::span<const Type> types() { return kTypes; }

namespace {

// One object of `attn`: the layers that it names become attention or windows.
void read_hybrid_part(const Keys& inner, ModelConfig& c, const char* base) {
  const Json* layers = inner.find("layers");
  if (layers == nullptr || !layers->is_array())
    inner.fail("layers", "the numbers of the layers with attention", layers == nullptr ? Json() : *layers);
  if (!inner.has("num_heads")) inner.fail("num_heads", "a whole number", Json());
  ModelConfig part = c;
  const std::string kind = read_attention_kind(inner, part);
  inner.must_be("qk_norm", false);  // FLA's hybrids do not hand it on
  inner.finish();
  const auto said = [&](const char* name) {
    return std::find(c.layers.begin(), c.layers.end(), name) != c.layers.end();
  };
  const bool again = said(kind.c_str()),
             differs = kind == "window" ? !(part.window == c.window) : !(part.attention == c.attention);
  if (again && differs)
    fail_usage(
        "{}: expected the same keys as the other layers of this kind ({}) have, got others (one set is computed here)",
        inner.where(), kind);
  c.window = part.window;
  c.attention = part.attention;
  for (const Json& layer : *layers) {
    const bool known = layer.is_number_integer() && layer.get<double>() >= 0 &&
                       layer.get<double>() < static_cast<double>(c.num_hidden_layers);
    if (!known) inner.fail("layers", fmt::format("numbers from 0 to {}", c.num_hidden_layers - 1), layer);
    std::string& kind_of_layer = c.layers[layer.get<size_t>()];
    if (kind_of_layer != base) inner.fail("layers", "every number once", layer);
    kind_of_layer = kind;
  }
}

}  // namespace

void read_hybrid(const Keys& keys, ModelConfig& c, const char* base) {
  const bool plain = std::string_view(base) == "recurrent";
  if (!plain) c.layers = {base};
  const Json* attn = keys.find("attn");
  if (attn == nullptr) return;
  const bool list = attn->is_array();
  const auto is_object = [](const Json& part) { return part.is_object(); };
  if (!is_object(*attn) && !(list && std::all_of(attn->begin(), attn->end(), is_object))) {
    keys.fail("attn", "an object with layers and num_heads, or a list of them", *attn);
  }
  if (c.num_hidden_layers < 1 || c.num_hidden_layers > 1 << 14)
    fail_usage("{}: num_hidden_layers: expected 1 to 16384, got {}", keys.where(), c.num_hidden_layers);
  c.layers.assign(static_cast<size_t>(c.num_hidden_layers), base);
  for (size_t i = 0; i < (list ? attn->size() : 1); ++i) {
    read_hybrid_part(
        {list ? (*attn)[i] : *attn, keys.where() + (list ? fmt::format(": attn[{}]", i) : ": attn"), keys.warnings()},
        c, base);
  }
  c.layers.resize(period(c.layers));
  if (plain && c.layers == StringList{base}) c.layers.clear();
}

void write_hybrid(const ModelConfig& c, Json& json) {
  Json all = Json::array();
  for (const LayerKind kind : {LayerKind::kAttention, LayerKind::kWindow}) {
    Json layers = Json::array();
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      if (c.layer_kind(i) == kind) layers.push_back(i);
    }
    if (layers.empty()) continue;
    Json attn = {{"layers", layers}};
    write_attention(c, kind, attn);
    all.push_back(attn);
  }
  if (all.size() == 1) all = Json(all[0]);
  if (!all.empty()) json["attn"] = all;
}

size_t period(const StringList& list) {
  for (size_t n = 1; n < list.size(); ++n) {
    bool repeats = true;
    for (size_t i = n; i < list.size() && repeats; ++i) repeats = list[i] == list[i - n];
    if (repeats) return n;
  }
  return list.size();
}

}  // namespace fw::hf
