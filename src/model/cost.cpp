#include "model/cost.h"

#include <algorithm>

#include "base/seq_layout.h"
#include "nn/mlp.h"
#include "nn/recurrence.h"

namespace fw {
namespace {

constexpr double kValue = sizeof(float);

// Values that forward keeps of a token, beside the mixer's input.
double kept_values(const AttentionSpec& spec) {
  const auto norms = static_cast<double>((spec.heads + spec.kv_heads) * (spec.head_dim + 1));
  return static_cast<double>(spec.columns() + spec.query_size() + spec.heads) + (spec.qk_norm ? norms : 0);
}
double kept_values(const ConvSpec& spec) { return static_cast<double>(spec.hidden); }
double kept_values(const SsdSpec& spec) {
  // Projection; after the convolution; time step and decay; output, gated, normalised and its statistic.
  return static_cast<double>(spec.columns() + spec.conv_channels() + 2 * spec.heads + 3 * spec.inner() + 1);
}
double kept_values(const MesaSpec& spec) {
  // Projection and those of the gates; q, k after the convolution and of unit length; v | k; x; output, normalised and its statistic.
  return static_cast<double>(spec.columns() + 3 * spec.heads + 9 * spec.size() + spec.heads);
}
double kept_values(const RecurrentMixerSpec& spec) {
  const ProjectionPlan plan(spec);
  const Rule& rule = spec.rule;
  int64_t n = plan.columns + 2 * spec.value_size() + spec.value_size() / spec.norm_size();  // projections; output before and after its norm, statistics
  if (spec.conv_size > 0) n += spec.conv_channels();
  if (spec.query_key.map != FeatureMap::kNone) n += (spec.query_key.map == FeatureMap::kProduct ? 4 : 1) * spec.value_begin();
  if (rule.uses_g()) {
    const int64_t channels = rule.decay == Decay::kChannel ? spec.decay_heads() * spec.key_dim : spec.v_heads;
    n += (spec.decay_rank > 0 ? 2 : 1) * channels;
  }
  if (spec.gate_rank > 0) n += spec.value_size();
  if (spec.derives_erase_gate()) n += spec.v_heads;
  if (rule.uses_erase_key()) n += spec.key_size();
  return static_cast<double>(n);
}

// Operations of a token beyond its products with weights.
double mixing(const AttentionSpec& spec, int64_t length) {
  const double T = static_cast<double>(length), W = spec.window > 0 ? std::min(static_cast<double>(spec.window), T) : T;
  const double seen = T > 0 ? (W * (W + 1) / 2 + (T - W) * W) / T : 0;  // tokens, the mean over a sequence
  return 4 * static_cast<double>(spec.query_size()) * seen;
}
double mixing(const ConvSpec&, int64_t) { return 0; }
// A value of a matrix is decayed (1), read by the erase key (2), written (2) and read (2).
double mixing(const Rule& rule, int64_t values) { return ((rule.uses_g() ? 1 : 0) + (rule.online() ? 2 : 0) + 4) * static_cast<double>(values); }
double mixing(const RecurrentMixerSpec& spec, int64_t) { return mixing(spec.rule, spec.v_heads * spec.key_dim * spec.value_dim); }
double mixing(const MesaSpec& spec, int64_t) {
  const double K = static_cast<double>(spec.dim), solve = spec.cg_steps > 0 ? 2 * K * K * static_cast<double>(spec.cg_steps) : K * K * K / 3;
  return mixing(MesaSpec::rule(), 2 * spec.heads * spec.dim * spec.dim) + static_cast<double>(spec.heads) * (solve + 3 * K * K);
}
double mixing(const SsdSpec& spec, int64_t) { return mixing(SsdSpec::rule(), spec.heads * spec.state * spec.head_dim); }

double saved_bytes(const RecurrentMixerSpec& spec, const SeqLayout& layout) {
  return static_cast<double>(Recurrence<float>({spec.rule, spec.heads, spec.v_heads, spec.key_dim, spec.value_dim}, layout, host_device()).saved_bytes());
}
double saved_bytes(const MesaSpec& spec, const SeqLayout& layout) {
  return static_cast<double>(Recurrence<float>({MesaSpec::rule(), spec.heads, spec.heads, spec.dim, 2 * spec.dim}, layout, host_device()).saved_bytes());
}
double saved_bytes(const SsdSpec& spec, const SeqLayout& layout) {
  return static_cast<double>(Recurrence<float>({SsdSpec::rule(), spec.groups, spec.heads, spec.state, spec.head_dim}, layout, host_device()).saved_bytes());
}
double saved_bytes(const AttentionSpec&, const SeqLayout&) { return 0; }
double saved_bytes(const ConvSpec&, const SeqLayout&) { return 0; }

// Matrices [out, in] that a token passes, and the maps of its heads.
double products(const std::vector<ParamSpec>& list, int64_t heads) {
  double n = 0;
  for (const ParamSpec& p : list) {
    if (p.shape.size() < 2) continue;
    n += static_cast<double>(p.size()) * (p.name.find("feature_map") != std::string::npos ? static_cast<double>(heads) : 1.0);
  }
  return 2 * n;
}

}  // namespace

namespace {

bool has_recurrence(LayerKind kind) { return kind == LayerKind::kRecurrent || kind == LayerKind::kSsd || kind == LayerKind::kMesa; }

}  // namespace

ModelCost cost_of(const ModelConfig& config, int64_t batch, int64_t length) {
  ModelCost cost;
  cost.parameters = parameter_count(config);
  const double hidden = static_cast<double>(config.hidden_size), head = 2 * hidden * static_cast<double>(config.vocab_size);
  const double tokens = static_cast<double>(batch) * static_cast<double>(length);
  const SeqLayout layout = SeqLayout::uniform(batch, length);
  const std::vector<ParamSpec> mlp = mlp_parameters({config.hidden_size, config.mlp_size(), config.init_scheme()}, "");
  cost.flops_token = head;
  double kept = hidden;  // the embedding's rows
  // Layers of an entry of the list are alike.
  const auto entries = std::max<int64_t>(static_cast<int64_t>(config.layers.size()), 1);
  for (int64_t i = 0; i < std::min(entries, config.num_hidden_layers); ++i) {
    const int64_t count = (config.num_hidden_layers - i + entries - 1) / entries;
    const auto times = static_cast<double>(count);
    const MixerSpec spec = config.layer_spec(i);
    const double mixer = std::visit([&](const auto& s) { return mixing(s, length); }, spec);
    (has_recurrence(config.layer_kind(i)) ? cost.flops_recurrence : cost.flops_attention) += times * mixer;
    cost.flops_token += times * (mixer + products(mixer_parameters(spec, ""), config.num_heads) + products(mlp, 1));
    for (const StateTensor& tensor : mixer_state(spec)) {
      const double bytes = kValue * times * static_cast<double>(tensor.size());
      if (tensor.kind == StateKind::kCache) {
        cost.state_bytes_token += bytes / static_cast<double>(tensor.shape[0]);
      } else {
        cost.state_bytes += bytes;
      }
    }
    kept += times * (2 * hidden + 1 + std::visit([](const auto& s) { return kept_values(s); }, spec));
    if (!mlp.empty()) kept += times * (2 * hidden + 1 + 3 * static_cast<double>(config.mlp_size()));
    cost.activation_bytes += times * std::visit([&](const auto& s) { return saved_bytes(s, layout); }, spec);
  }
  cost.activation_bytes += kValue * kept * tokens;
  cost.optimiser_bytes = 4 * kValue * cost.parameters;
  return cost;
}

}  // namespace fw
