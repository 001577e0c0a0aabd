#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/error.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr const char* kRecurrentLayer = "recurrent";
constexpr const char* kExperts = "experts";  // of `mlp`
constexpr double kMaxTensor = 2147483648.0;  // 2^31 values
constexpr int kMaxParameterBits = 35, kMaxExpertParameterBits = 37;

// In the order of PositionFactor.
const StringList& gain_factors() {
  static const StringList names{"none", "1/t", "1/sqrt(t)", "1/log(t+1)"};
  return names;
}

double value_count(const ParamSpec& spec) {
  double n = 1;
  for (int64_t s : spec.shape) n *= static_cast<double>(s);
  return n;
}

std::vector<ParamSpec> layer_parameters(const ModelConfig& c, int64_t i) {
  std::vector<ParamSpec> layer = norm_parameters(c.norm_spec(), "attn_norm");
  const auto add = [&](const std::vector<ParamSpec>& more) { layer.insert(layer.end(), more.begin(), more.end()); };
  add(mixer_parameters(c.layer_spec(i), "attn."));
  if (c.mlp_size() > 0) add(norm_parameters(c.norm_spec(), "mlp_norm"));
  add(mlp_parameters(c.mlp_spec(i), "mlp."));
  return layer;
}
double count_of(const std::vector<ParamSpec>& list) {
  double n = 0;
  for (const ParamSpec& spec : list) n += value_count(spec);
  return n;
}

// Entries of the list of layers, which stand for all.
int64_t entries(const ModelConfig& c) { return std::max<int64_t>(static_cast<int64_t>(c.layers.size()), 1); }

void check_size(const ModelConfig& c) {
  // The first layer of an entry may have less than its next, and the first layers no experts.
  const int64_t various = std::min(2 * entries(c), c.num_hidden_layers);
  for (int64_t i = 0; i <= various; ++i) {
    for (const ParamSpec& spec : layer_parameters(c, i < various ? i : c.num_hidden_layers - 1)) {
      if (value_count(spec) > kMaxTensor) {
        fail_usage(
            "{}: expected at most 2^31 values in one parameter, these sizes give {:.3g}; lower hidden_size, heads or "
            "head_dim",
            spec.name, value_count(spec));
      }
    }
  }
  if (static_cast<double>(c.vocab_size) * static_cast<double>(c.hidden_size) > kMaxTensor) {
    fail_usage("vocab_size: expected vocab_size * hidden_size <= 2^31, got {} * {}", c.vocab_size, c.hidden_size);
  }
  const double total = parameter_count(c);
  const int bits = c.mlp == kExperts ? kMaxExpertParameterBits : kMaxParameterBits;
  if (total > std::exp2(bits))
    fail_usage(
        "model size: expected at most 2^{} parameters, these sizes give {:.3g}; lower num_hidden_layers or hidden_size",
        bits, total);
}

FeatureMap feature_map_kind(const std::string& name) {
  if (name == "elu") return FeatureMap::kElu;
  if (name == "relu") return FeatureMap::kRelu;
  if (name == "silu") return FeatureMap::kSilu;
  return name == "product" ? FeatureMap::kProduct : FeatureMap::kNone;
}

}  // namespace

Rule ModelConfig::resolved_rule() const {
  Rule r = parse_rule(rule);
  const Rule standard;
  const double bound = allow_neg_eigval || r.gain_bound == 2.0 ? 2.0 : 1.0;
  if (r.gain_bound != standard.gain_bound && r.gain_bound != bound) {
    fail_usage(
        "rule: gain_bound: expected 1 or, for eigenvalues in [-1, 1], 2 (allow_neg_eigval), got gain_bound={} in '{}'",
        r.gain_bound, rule);
  }
  if (r.precond_x != standard.precond_x && r.precond_x != precond_x) {
    fail_usage("rule: precond_x has a key of its own ({} here), got precond_x={} in '{}'; set precond_x instead",
               precond_x, r.precond_x, rule);
  }
  r.gain_bound = bound;
  r.precond_x = precond_x;
  validate(r);
  return r;
}

int64_t ModelConfig::head_v_dim() const {
  return static_cast<int64_t>(std::llround(expand_v * static_cast<double>(head_dim)));
}

int64_t ModelConfig::mlp_size() const {
  if (mlp == "none") return 0;
  if (intermediate_size > 0) return intermediate_size;
  if (mlp == "channel_mix") {
    constexpr int64_t kStep = 32;
    return std::max<int64_t>(
               (static_cast<int64_t>(hidden_ratio * static_cast<double>(hidden_size)) + kStep - 1) / kStep, 1) *
           kStep;
  }
  const int64_t step = hidden_size < 512 ? 64 : 256;
  const int64_t size = static_cast<int64_t>(hidden_ratio * static_cast<double>(hidden_size) * 2.0 / 3.0);
  return std::max<int64_t>((size + step - 1) / step, 1) * step;
}

namespace {

GateKind gate_of(const std::string& name) {
  return name == "none" ? GateKind::kNone : name == "sigmoid" ? GateKind::kSigmoid : GateKind::kSilu;
}

}  // namespace

int64_t ModelConfig::dense_layers() const {
  return mlp == kExperts ? std::min(experts.dense_layers, num_hidden_layers) : num_hidden_layers;
}

MlpSpec ModelConfig::mlp_spec(int64_t layer) const {
  MlpSpec spec;
  spec.hidden = hidden_size;
  spec.size = mlp_size();
  spec.init = init_scheme();
  spec.layer = layer;
  spec.layers = num_hidden_layers;
  if (mlp == "channel_mix") spec.kind = MlpKind::kChannelMix;
  if (layer < dense_layers()) return spec;
  spec.kind = MlpKind::kExperts;
  ExpertsSpec& of = spec.experts;
  of.router = {experts.router == "sigmoid" ? RouterScore::kSigmoid : RouterScore::kSoftmax,
               experts.num_experts,
               experts.top_k,
               experts.groups,
               experts.top_groups,
               experts.normalise,
               experts.scale};
  of.correction_bias = experts.correction_bias;
  of.size = experts.intermediate_size > 0 ? experts.intermediate_size : std::max<int64_t>(spec.size / experts.top_k, 1);
  of.shared_size = experts.shared_size;
  of.shared_gate = experts.shared_gate;
  return spec;
}

NormSpec ModelConfig::norm_spec() const {
  return {norm == "layer" ? NormKind::kLayer : NormKind::kRms, hidden_size, norm_eps, norm == "zero_centered_rms"};
}

NormPosition ModelConfig::norm_position(int64_t layer) const {
  const LayerKind kind = layer_kind(layer);
  const bool behind =
      (kind == LayerKind::kAttention && attention.post_norm) || (kind == LayerKind::kWindow && window.post_norm);
  return behind ? NormPosition::kBehind : NormPosition::kBefore;
}

std::vector<StateTensor> ModelConfig::layer_state(int64_t layer) const {
  std::vector<StateTensor> list = mixer_state(layer_spec(layer));
  for (StateTensor& tensor : mlp_state(mlp_spec(layer))) list.push_back(std::move(tensor));
  return list;
}

GateKind ModelConfig::gate_kind() const { return gate_of(output_gate); }

InitScheme ModelConfig::init_scheme() const {
  return init == "normal" ? InitScheme::kNormal : init == "torch" ? InitScheme::kTorch : InitScheme::kXavier;
}

RecurrentMixerSpec ModelConfig::mixer_spec() const {
  RecurrentMixerSpec spec;
  spec.rule = resolved_rule();
  spec.hidden = hidden_size;
  spec.heads = num_heads;
  spec.v_heads = v_heads();
  spec.key_dim = head_dim;
  spec.value_dim = head_v_dim();
  spec.conv_size = conv_size;
  spec.gate = gate_kind();
  spec.gate_rank = output_gate_rank;
  spec.gate_bias = output_gate_bias;
  spec.decay_rank = decay_rank;
  spec.decay_per_value_head = decay_per_value_head;
  spec.log_sigmoid_decay = decay_gate == "logsigmoid";
  spec.raw_read_correction = raw_read_correction;
  spec.gain.learned = gain_source == "learned";
  spec.gain.factor = static_cast<PositionFactor>(std::find(gain_factors().begin(), gain_factors().end(), gain_factor) -
                                                 gain_factors().begin());
  spec.gain.single_gate = single_gate;
  spec.tied_precond = precond_gates == "tied";
  spec.exp_precond_center = precond_center == "exp";
  spec.width_norm = output_norm == "width";
  spec.norm_eps = output_norm_eps > 0 ? output_norm_eps : norm_eps;
  spec.init = init_scheme();
  spec.query_key = {num_heads, head_dim, feature_map_kind(feature_map), rope_theta, spec.init};
  return spec;
}

namespace {

// Kinds of layers that are not rules, by name.
struct NamedKind {
  const char* name;
  LayerKind kind;
};
constexpr NamedKind kKinds[] = {{"attention", LayerKind::kAttention}, {"window", LayerKind::kWindow},
                                {"conv", LayerKind::kConv},           {"ssd", LayerKind::kSsd},
                                {"mamba", LayerKind::kMamba},         {"longhorn_diag", LayerKind::kLonghornDiag},
                                {"mesa", LayerKind::kMesa},           {"rwkv7", LayerKind::kRwkv7},
                                {"mamba3", LayerKind::kMamba3},       {"mla", LayerKind::kMla}};

}  // namespace

bool is_recurrence(LayerKind kind) {
  return kind != LayerKind::kAttention && kind != LayerKind::kWindow && kind != LayerKind::kConv &&
         kind != LayerKind::kMla;
}

LayerKind ModelConfig::layer_kind(int64_t layer) const {
  if (layers.empty()) return LayerKind::kRecurrent;
  const std::string& name = layers[static_cast<size_t>(layer) % layers.size()];
  for (const NamedKind& known : kKinds) {
    if (name == known.name) return known.kind;
  }
  return LayerKind::kRecurrent;
}

std::string ModelConfig::layer_rule(int64_t layer) const {
  const std::string name = layers.empty() ? kRecurrentLayer : layers[static_cast<size_t>(layer) % layers.size()];
  return name == kRecurrentLayer ? rule : name;
}

bool ModelConfig::has_recurrence() const {
  for (int64_t i = 0; i < entries(*this); ++i) {
    if (layer_kind(i) == LayerKind::kRecurrent) return true;
  }
  return false;
}

std::string ModelConfig::mixers() const {
  std::string text;
  for (int64_t i = 0; i < entries(*this); ++i) text += (i > 0 ? " + " : "") + layer_rule(i);
  return text;
}

AttentionSpec ModelConfig::attention_spec(const AttentionKeys& keys, int64_t window_size) const {
  AttentionSpec spec;
  spec.hidden = hidden_size;
  spec.heads = keys.num_heads > 0 ? keys.num_heads : num_heads;
  spec.kv_heads = keys.num_kv_heads > 0 ? keys.num_kv_heads : spec.heads;
  spec.head_dim = keys.head_dim > 0 ? keys.head_dim : hidden_size / spec.heads;
  spec.window = window_size;
  spec.rope_theta = keys.rope_theta;
  spec.rotated = std::llround(keys.rope_fraction * static_cast<double>(spec.head_dim));
  spec.qk_norm = keys.qk_norm;
  spec.qk_norm_all_heads = keys.qk_norm_all_heads;
  spec.qk_norm_zero_centered = norm == "zero_centered_rms";
  spec.qk_norm_eps = keys.qk_norm_eps;
  spec.output_gate = keys.output_gate;
  spec.qkv_bias = keys.qkv_bias;
  spec.init = init_scheme();
  return spec;
}

SsdSpec ModelConfig::ssd_spec() const {
  const int64_t inner = ssd.expand * hidden_size;
  return {hidden_size,    inner / ssd.head_dim, ssd.head_dim, ssd.num_groups,
          ssd.state_size, ssd.conv_size,        norm_eps,     init_scheme()};
}

SelectiveSpec ModelConfig::selective_spec(ScanLaw law) const {
  constexpr int64_t kPerRank = 16;  // of the model's width
  const int64_t rank = mamba.dt_rank > 0 ? mamba.dt_rank : (hidden_size + kPerRank - 1) / kPerRank;
  return {law, hidden_size, mamba.expand * hidden_size, mamba.state_size, rank, mamba.conv_size, init_scheme()};
}

MesaSpec ModelConfig::mesa_spec() const {
  MesaSpec spec;
  spec.hidden = hidden_size;
  spec.heads = mesa.num_heads > 0 ? mesa.num_heads : num_heads;
  spec.dim = mesa.head_dim > 0 ? mesa.head_dim : head_dim;
  spec.conv_size = mesa.conv_size;
  spec.gate = gate_of(mesa.output_gate);
  spec.least_lambda = mesa.least_lambda;
  spec.cg_steps = mesa.cg_steps;
  spec.cg_tolerance = mesa.cg_tolerance;
  spec.norm_eps = norm_eps;
  spec.init = init_scheme();
  return spec;
}

int64_t ModelConfig::first_rwkv7() const {
  for (int64_t i = 0; i < std::min(entries(*this), num_hidden_layers); ++i) {
    if (layer_kind(i) == LayerKind::kRwkv7) return i;
  }
  return -1;
}

Rwkv7Spec ModelConfig::rwkv7_spec(int64_t layer) const {
  constexpr double kPlainDim = 64;  // of a head; wider ones have wider ranks
  constexpr int64_t kStep = 32;
  Rwkv7Spec spec;
  spec.hidden = hidden_size;
  spec.dim = rwkv7.head_dim > 0 ? rwkv7.head_dim : head_dim;
  const auto rank = [&](int64_t given, double roots) {
    if (given > 0) return given;
    const double width = roots * std::sqrt(static_cast<double>(hidden_size)) / static_cast<double>(kStep);
    // to even at halves, as published
    return std::max<int64_t>(static_cast<int64_t>(std::nearbyint(width)), 1) * kStep;
  };
  const double wider = static_cast<double>(spec.dim) / kPlainDim;
  spec.decay_rank = rank(rwkv7.decay_rank, 2.5 * wider);
  spec.rate_rank = rank(rwkv7.rate_rank, 2.5 * wider);
  spec.value_rank = rank(rwkv7.value_rank, 1.7 * wider);
  spec.gate_rank = rank(rwkv7.gate_rank, 5);
  spec.key_eps = rwkv7.key_eps;
  spec.norm_eps = norm_eps;
  spec.first = layer == first_rwkv7();
  spec.layer = layer;
  spec.layers = num_hidden_layers;
  return spec;
}

Mamba3Spec ModelConfig::mamba3_spec() const {
  Mamba3Spec spec;
  spec.hidden = hidden_size;
  spec.heads = mamba3.expand * hidden_size / mamba3.head_dim;
  spec.head_dim = mamba3.head_dim;
  spec.groups = mamba3.num_groups;
  spec.state = mamba3.state_size;
  spec.mimo_rank = mamba3.mimo_rank;
  spec.angles = static_cast<int64_t>(static_cast<double>(mamba3.state_size) * mamba3.rope_fraction) / 2;
  spec.rotate_half = mamba3.rotation == "halves" || (mamba3.rotation == "auto" && mamba3.mimo_rank > 0);
  spec.decay = {mamba3.decay_activation == "heavy_tail", mamba3.decay_floor};
  spec.output_norm = mamba3.output_norm;
  spec.norm_eps = norm_eps;
  spec.init = init_scheme();
  return spec;
}

MlaSpec ModelConfig::mla_spec() const {
  const int64_t heads = mla.num_heads > 0 ? mla.num_heads : num_heads;
  return {hidden_size, heads, mla.kv_rank, mla.key_dim, mla.shared_key_dim, mla.value_dim, init_scheme()};
}

MixerSpec ModelConfig::layer_spec(int64_t layer) const {
  switch (layer_kind(layer)) {
    case LayerKind::kAttention:
      return attention_spec(attention, 0);
    case LayerKind::kWindow:
      return attention_spec(window, window.window);
    case LayerKind::kConv:
      return ConvSpec{hidden_size, conv.kernel, init_scheme()};
    case LayerKind::kSsd:
      return ssd_spec();
    case LayerKind::kMamba:
      return selective_spec(ScanLaw::kMamba);
    case LayerKind::kLonghornDiag:
      return selective_spec(ScanLaw::kLonghorn);
    case LayerKind::kMesa:
      return mesa_spec();
    case LayerKind::kRwkv7:
      return rwkv7_spec(layer);
    case LayerKind::kMamba3:
      return mamba3_spec();
    case LayerKind::kMla:
      return mla_spec();
    case LayerKind::kRecurrent:
      break;
  }
  ModelConfig own = *this;
  own.rule = layer_rule(layer);
  RecurrentMixerSpec spec = own.mixer_spec();
  if (decay_gate == "bounded") spec.bounded_layer = layer;
  return spec;
}

std::vector<ParamSpec> shared_parameters(const ModelConfig& c) {
  if (c.decay_gate != "bounded" || !c.has_recurrence()) return {};
  return {decay_bounds_parameter(c.num_hidden_layers, c.num_heads * c.head_dim)};
}

double mlp_parameter_count(const MlpSpec& spec, bool active) {
  double n = 0;
  for (const ParamSpec& p : mlp_parameters(spec, "")) {
    const RouterShape& router = spec.experts.router;
    const double share =
        active && p.stacked ? static_cast<double>(router.chosen) / static_cast<double>(router.experts) : 1.0;
    n += share * value_count(p);
  }
  return n;
}

namespace {

double parameters_of(const ModelConfig& c, bool active) {
  const double hidden = static_cast<double>(c.hidden_size), norm = count_of(norm_parameters(c.norm_spec(), ""));
  double layers = count_of(shared_parameters(c));
  for (int64_t i = 0; i < std::min(entries(c), c.num_hidden_layers); ++i) {
    // An entry's first layer may differ from its others, which are alike.
    const int64_t others = (c.num_hidden_layers - i - 1) / entries(c);
    layers += count_of(mixer_parameters(c.layer_spec(i), ""));
    if (others > 0)
      layers += static_cast<double>(others) * count_of(mixer_parameters(c.layer_spec(i + entries(c)), ""));
  }
  const auto depth = static_cast<double>(c.num_hidden_layers), dense = static_cast<double>(c.dense_layers());
  layers += depth * norm * (c.mlp_size() > 0 ? 2 : 1) + dense * mlp_parameter_count(c.mlp_spec(0), active);
  if (dense < depth) layers += (depth - dense) * mlp_parameter_count(c.mlp_spec(c.num_hidden_layers - 1), active);
  return layers + (c.tie_word_embeddings ? 1 : 2) * static_cast<double>(c.vocab_size) * hidden +
         (c.embedding_norm ? 2 : 1) * norm;
}

}  // namespace

double parameter_count(const ModelConfig& c) { return parameters_of(c, false); }
double active_parameter_count(const ModelConfig& c) { return parameters_of(c, true); }

#define FW_KEY FW_KEY_ENTRY
namespace {

std::vector<Key> keys_of(AttentionKeys& c) {
  return {
#include "model/attention.def"
  };
}
std::vector<Key> keys_of(WindowKeys& c) {
  std::vector<Key> keys = {
#include "model/window.def"
  };
  const std::vector<Key> shared = keys_of(static_cast<AttentionKeys&>(c));
  keys.insert(keys.end(), shared.begin(), shared.end());
  return keys;
}
std::vector<Key> keys_of(ConvKeys& c) {
  return {
#include "model/conv.def"
  };
}
std::vector<Key> keys_of(SsdKeys& c) {
  return {
#include "model/ssd.def"
  };
}
std::vector<Key> keys_of(MambaKeys& c) {
  return {
#include "model/mamba.def"
  };
}
std::vector<Key> keys_of(MesaKeys& c) {
  return {
#include "model/mesa.def"
  };
}
std::vector<Key> keys_of(Rwkv7Keys& c) {
  return {
#include "model/rwkv7.def"
  };
}
std::vector<Key> keys_of(Mamba3Keys& c) {
  return {
#include "model/mamba3.def"
  };
}
std::vector<Key> keys_of(MlaKeys& c) {
  return {
#include "model/mla.def"
  };
}
std::vector<Key> keys_of(ExpertsKeys& c) {
  return {
#include "model/experts.def"
  };
}

}  // namespace

KeyTables key_tables(ModelConfig& c) {
  return {{"model",
           "Model",
           {
#include "model/config.def"
           }},
          {"mixer.attention", "Layers of softmax attention", keys_of(c.attention)},
          {"mixer.window", "Layers of sliding-window attention", keys_of(c.window)},
          {"mixer.conv", "Layers of gated convolution", keys_of(c.conv)},
          {"mixer.ssd", "Layers of Mamba-2", keys_of(c.ssd)},
          {"mixer.mamba", "Layers of Mamba and of published Longhorn", keys_of(c.mamba)},
          {"mixer.mesa", "Mesa layers", keys_of(c.mesa)},
          {"mixer.rwkv7", "Layers of RWKV-7", keys_of(c.rwkv7)},
          {"mixer.mamba3", "Layers of Mamba-3", keys_of(c.mamba3)},
          {"mixer.mla", "Layers of multi-head latent attention", keys_of(c.mla)},
          {"ffn.experts", "Mixtures of experts", keys_of(c.experts)}};
}
#undef FW_KEY

namespace {

// The table of a layer's keys; "": those of the model's own.
std::string_view table_of(LayerKind kind) {
  switch (kind) {
    case LayerKind::kRecurrent:
      return {};
    case LayerKind::kAttention:
      return "mixer.attention";
    case LayerKind::kWindow:
      return "mixer.window";
    case LayerKind::kConv:
      return "mixer.conv";
    case LayerKind::kSsd:
      return "mixer.ssd";
    case LayerKind::kMamba:
    case LayerKind::kLonghornDiag:
      return "mixer.mamba";
    case LayerKind::kMesa:
      return "mixer.mesa";
    case LayerKind::kRwkv7:
      return "mixer.rwkv7";
    case LayerKind::kMamba3:
      return "mixer.mamba3";
    case LayerKind::kMla:
      return "mixer.mla";
  }
  return {};
}

}  // namespace

std::vector<std::string> unused_tables(const ModelConfig& config) {
  ModelConfig copy = config;
  std::vector<std::string> unused;
  for (const KeyTable& table : key_tables(copy)) {
    bool used = table.name == "model" || (table.name == "ffn.experts" && config.mlp == kExperts);
    for (int64_t layer = 0; layer < config.num_hidden_layers && !used; ++layer)
      used = table_of(config.layer_kind(layer)) == table.name;
    if (!used) unused.emplace_back(table.name);
  }
  return unused;
}

namespace {

// What the keys of a recurrence must be together, for the rule c.rule.
void check_recurrence(const ModelConfig& c) {
  if (c.v_heads() % c.num_heads != 0)
    fail_usage("num_v_heads: expected a multiple of num_heads = {} (every key head serves as many value heads), got {}",
               c.num_heads, c.num_v_heads);
  const double value_dim = c.expand_v * static_cast<double>(c.head_dim);
  if (!(value_dim >= 1.0 && value_dim <= 65536.0) || std::abs(value_dim - std::round(value_dim)) > 1e-9 * value_dim) {
    fail_usage("expand_v: expected a number with expand_v * head_dim whole and from 1 to 65536, got {} * {} = {}",
               c.expand_v, c.head_dim, value_dim);
  }
  if (c.rope_theta > 0.0 && c.head_dim % 2 != 0)
    fail_usage("rope_theta: expected 0 with an odd head_dim = {}, got {}", c.head_dim, c.rope_theta);
  if (c.output_gate_rank > 0 && c.output_gate == "none")
    fail_usage("output_gate_rank: expected 0 with output_gate 'none', got {}", c.output_gate_rank);

  const Rule rule = c.resolved_rule();
  const bool channel_decay = rule.decay == Decay::kChannel;
  if (c.decay_rank > 0 && !channel_decay)
    fail_usage("decay_rank: expected 0, because rule '{}' has no channel decay, got {}", c.rule, c.decay_rank);
  if (c.decay_per_value_head && !channel_decay)
    fail_usage("decay_per_value_head: expected false, because rule '{}' has no channel decay, got true", c.rule);
  if (c.decay_gate != "softplus" && !channel_decay)
    fail_usage("decay_gate: expected softplus, because rule '{}' has no channel decay, got {}", c.rule, c.decay_gate);
  if (c.decay_gate == "bounded" && (c.decay_per_value_head || c.decay_rank > 0)) {
    fail_usage(
        "decay_gate: expected softplus or logsigmoid with decay_rank or decay_per_value_head (a bound is one of a key "
        "channel), got bounded");
  }
  if (!rule.uses_k() &&
      (c.decay_per_value_head || rule.uses_erase_key() || rule.uses_erase_write() || c.raw_read_correction)) {
    fail_usage(
        "rule: expected one whose keys are given with decay_per_value_head, raw_read_correction, an erase key or an "
        "erase-write vector of its own, got '{}'",
        c.rule);
  }
  if (!rule.uses_beta()) {
    if (c.gain_source != "projection")
      fail_usage("gain_source: expected projection, because rule '{}' has no gain gate, got {}", c.rule, c.gain_source);
    if (c.gain_factor != "none")
      fail_usage("gain_factor: expected none, because rule '{}' has no gain gate, got {}", c.rule, c.gain_factor);
  }
  if (c.single_gate && (!rule.uses_beta() || rule.decay != Decay::kScalar || rule.gain_bound != 1.0)) {
    fail_usage(
        "single_gate: expected false, because the decay 1 - gain needs a scalar decay and a gain gate up to 1, got "
        "true with rule '{}'",
        c.rule);
  }
  if (c.precond_gates == "tied" &&
      (!rule.uses_precond() || !rule.uses_beta() || (rule.decay != Decay::kScalar && rule.decay != Decay::kNone))) {
    fail_usage(
        "precond_gates: expected own, because tied gates need a preconditioner, a gain gate and a scalar decay or "
        "none, got tied with rule '{}'",
        c.rule);
  }
  if (c.precond_center == "exp" && !rule.uses_precond_center()) {
    fail_usage("precond_center: expected parameter, because rule '{}' has no preconditioner with a center, got exp",
               c.rule);
  }
  if (c.raw_read_correction && rule.uses_read_correction())
    fail_usage("raw_read_correction: expected false, because rule '{}' corrects the read already, got true", c.rule);
  const RecurrentMixerSpec spec = c.mixer_spec();
  if (c.allow_neg_eigval && !spec.gain_doubles() && !spec.erase_doubles()) {
    fail_usage("allow_neg_eigval: expected false, because rule '{}' has no gate on what it erases, got true", c.rule);
  }
}

void check_attention(const ModelConfig& c, const std::string& table, const AttentionKeys& keys) {
  const AttentionSpec spec = c.attention_spec(keys, 0);
  if (spec.heads % spec.kv_heads != 0) {
    fail_usage(
        "mixer.{}.num_kv_heads: expected a number that divides the {} query heads (each serves as many of them), got "
        "{}",
        table, spec.heads, spec.kv_heads);
  }
  if (keys.head_dim == 0 && c.hidden_size % spec.heads != 0) {
    fail_usage("mixer.{}.head_dim: expected a width, because {} heads do not divide hidden_size = {}, got 0", table,
               spec.heads, c.hidden_size);
  }
  if (spec.head_dim > 4096)
    fail_usage("mixer.{}.head_dim: expected heads of at most 4096, hidden_size / num_heads gives {}", table,
               spec.head_dim);
  if (keys.qk_norm_all_heads && !keys.qk_norm)
    fail_usage("mixer.{}.qk_norm_all_heads: expected false without qk_norm, got true", table);
  if (keys.rope_theta > 0 && (spec.rotated < 2 || spec.rotated % 2 != 0)) {
    fail_usage("mixer.{}.rope_fraction: expected a share that gives an even number of rotated channels, got {} of {}",
               table, keys.rope_fraction, spec.head_dim);
  }
}

void check_ssd(const ModelConfig& c) {
  const int64_t inner = c.ssd.expand * c.hidden_size;
  if (inner % c.ssd.head_dim != 0) {
    fail_usage("mixer.ssd.head_dim: expected a number that divides expand * hidden_size = {}, got {}", inner,
               c.ssd.head_dim);
  }
  const SsdSpec spec = c.ssd_spec();
  if (spec.heads > 1 << 16)
    fail_usage("mixer.ssd.head_dim: expected at most 65536 heads, {} / {} gives {}", inner, spec.head_dim, spec.heads);
  if (spec.heads % spec.groups != 0)
    fail_usage("mixer.ssd.num_groups: expected a number that divides the {} heads, got {}", spec.heads, spec.groups);
}

void check_rwkv7(const ModelConfig& c) {
  const int64_t dim = c.rwkv7.head_dim > 0 ? c.rwkv7.head_dim : c.head_dim;
  if (dim > 1024 || c.hidden_size % dim != 0) {
    fail_usage("mixer.rwkv7.head_dim: expected a width up to 1024 that divides hidden_size = {}, got {}", c.hidden_size,
               dim);
  }
}

void check_mamba3(const ModelConfig& c) {
  const int64_t inner = c.mamba3.expand * c.hidden_size;
  if (inner % c.mamba3.head_dim != 0) {
    fail_usage("mixer.mamba3.head_dim: expected a number that divides expand * hidden_size = {}, got {}", inner,
               c.mamba3.head_dim);
  }
  const Mamba3Spec spec = c.mamba3_spec();
  if (spec.heads > 1 << 16)
    fail_usage("mixer.mamba3.head_dim: expected at most 65536 heads, {} / {} gives {}", inner, spec.head_dim,
               spec.heads);
  if (spec.heads % spec.groups != 0)
    fail_usage("mixer.mamba3.num_groups: expected a number that divides the {} heads, got {}", spec.heads, spec.groups);
  if (spec.angles < 1) {
    fail_usage("mixer.mamba3.rope_fraction: expected a share that rotates at least 2 of the {} channels, got {}",
               spec.state, c.mamba3.rope_fraction);
  }
  if (spec.rotate_half && spec.state % 2 != 0) {
    fail_usage(
        "mixer.mamba3.state_size: expected an even number with rotation = halves (the way of MIMO unless said), got {}",
        spec.state);
  }
}

void check_experts(const ModelConfig& c) {
  const ExpertsKeys& e = c.experts;
  if (e.num_experts % e.groups != 0)
    fail_usage("ffn.experts.groups: expected a number that divides the {} experts, got {}", e.num_experts, e.groups);
  if (e.top_groups > e.groups)
    fail_usage("ffn.experts.top_groups: expected at most groups = {}, got {}", e.groups, e.top_groups);
  const int64_t open = e.num_experts / e.groups * e.top_groups;
  if (e.top_k > open)
    fail_usage("ffn.experts.top_k: expected at most the {} experts that a token chooses from, got {}", open, e.top_k);
  if (e.shared_gate && e.shared_size == 0)
    fail_usage("ffn.experts.shared_gate: expected false without a shared expert (shared_size = 0), got true");
}

}  // namespace

void validate(const ModelConfig& c) {
  ModelConfig copy = c;
  check_ranges(key_tables(copy));
  if (static_cast<int64_t>(c.layers.size()) > c.num_hidden_layers) {
    fail_usage("layers: expected at most num_hidden_layers = {} entries, got {}", c.num_hidden_layers, c.layers.size());
  }
  std::set<std::string> rules;
  bool attention = false, window = false, ssd = false, rwkv7 = false, mamba3 = false;
  for (int64_t i = 0; i < entries(c); ++i) {
    const LayerKind kind = c.layer_kind(i);
    ssd = ssd || kind == LayerKind::kSsd;
    rwkv7 = rwkv7 || kind == LayerKind::kRwkv7;
    mamba3 = mamba3 || kind == LayerKind::kMamba3;
    attention = attention || kind == LayerKind::kAttention;
    window = window || kind == LayerKind::kWindow;
    if (kind != LayerKind::kRecurrent || !rules.insert(c.layer_rule(i)).second) continue;
    copy.rule = c.layer_rule(i);
    try {
      check_recurrence(copy);
    } catch (const Error& error) {
      if (copy.rule == c.rule) throw;
      throw Error(error.kind(), fmt::format("layers: '{}' (a mixer is recurrent, attention, window, conv, ssd, mamba, "
                                            "longhorn_diag, mesa, rwkv7, mamba3, mla or a rule): {}",
                                            copy.rule, error.what()));
    }
  }
  if (attention) check_attention(c, "attention", c.attention);
  if (window) check_attention(c, "window", c.window);
  if (ssd) check_ssd(c);
  if (rwkv7) check_rwkv7(c);
  if (mamba3) check_mamba3(c);
  if (c.mlp == kExperts) check_experts(c);
  check_size(c);
}

ModelConfig config_from_json(const nlohmann::json& json, const std::string& where) {
  if (!json.is_object())
    fail_usage("{}: expected a JSON object with the model's configuration, got {}", where, shown(json));
  ModelConfig config;
  if (const auto it = json.find("model_type"); it != json.end() && *it != "fastweight")
    fail_usage("{}: model_type: expected \"fastweight\", got {}", where, shown(*it));
  keys_from_json(key_tables(config), json, where, {"model_type", "peer"});
  if (const auto it = json.find("peer"); it != json.end()) {
    if (!it->is_object())
      fail_usage("{}: peer: expected an object, as 'fastweight import' writes it, got {}", where, shown(*it));
    config.hf = it->dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  try {
    validate(config);
  } catch (const Error& error) {
    throw Error(error.kind(), where + ": " + error.what());
  }
  return config;
}

nlohmann::json config_to_json(const ModelConfig& config) {
  Json json = Json::object();
  json["model_type"] = "fastweight";
  ModelConfig copy = config;
  keys_to_json(key_tables(copy), json);
  // What models had before their layers were a list is written as it was then: a run's checkpoints know their run by
  // this text.
  const ModelConfig standard;
  if (config.layers.empty()) json.erase("layers");
  if (config.mlp == standard.mlp) json.erase("mlp");
  if (config.norm == standard.norm) json.erase("norm");
  if (config.embedding_norm == standard.embedding_norm) json.erase("embedding_norm");
  if (config.output_gate_bias == standard.output_gate_bias) json.erase("output_gate_bias");
  if (config.output_norm == standard.output_norm) json.erase("output_norm");
  if (config.output_norm_eps == standard.output_norm_eps) json.erase("output_norm_eps");
  // And so is what older configurations do not have.
  const std::pair<const char*, std::pair<const AttentionKeys*, const AttentionKeys*>> tables[] = {
      {"attention", {&config.attention, &standard.attention}}, {"window", {&config.window, &standard.window}}};
  for (const auto& [table, keys] : tables) {
    Json& of = json["mixer"][table];
    const auto& [ours, plain] = keys;
    if (ours->qk_norm_all_heads == plain->qk_norm_all_heads) of.erase("qk_norm_all_heads");
    if (ours->qk_norm_eps == plain->qk_norm_eps) of.erase("qk_norm_eps");
    if (ours->output_gate == plain->output_gate) of.erase("output_gate");
    if (ours->post_norm == plain->post_norm) of.erase("post_norm");
  }
  if (config.ssd == standard.ssd) json["mixer"].erase("ssd");
  if (config.mamba == standard.mamba) json["mixer"].erase("mamba");
  if (config.mesa == standard.mesa) json["mixer"].erase("mesa");
  if (config.rwkv7 == standard.rwkv7) json["mixer"].erase("rwkv7");
  if (config.mamba3 == standard.mamba3) json["mixer"].erase("mamba3");
  if (config.mla == standard.mla) json["mixer"].erase("mla");
  if (config.attention == standard.attention && config.window == standard.window && config.conv == standard.conv &&
      config.ssd == standard.ssd && config.mamba == standard.mamba && config.mesa == standard.mesa &&
      config.rwkv7 == standard.rwkv7 && config.mamba3 == standard.mamba3 && config.mla == standard.mla) {
    json.erase("mixer");
  }
  if (config.experts == standard.experts) json.erase("ffn");
  // The key keeps its name: it is part of that text.
  if (!config.hf.empty()) json["peer"] = Json::parse(config.hf);
  return json;
}

}  // namespace fw
