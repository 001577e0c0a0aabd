#include "model/cost.h"

#include <algorithm>

#include "nn/mlp.h"
#include "nn/recurrence_cost.h"

namespace fw {
namespace {

// Operations of a token beyond its products with weights; of a mixer that is not named here, none.
template <class Spec>
double mixing(const Spec& /*spec*/, int64_t /*length*/) {
  return 0;
}
double mixing(const AttentionSpec& spec, int64_t length) {
  const double T = static_cast<double>(length), W = spec.window > 0 ? std::min(static_cast<double>(spec.window), T) : T;
  const double seen = T > 0 ? (W * (W + 1) / 2 + (T - W) * W) / T : 0;  // tokens, the mean over a sequence
  return 4 * static_cast<double>(spec.query_size()) * seen;
}
double mixing(const RecurrentMixerSpec& spec, int64_t /*length*/) {
  return static_cast<double>(spec.v_heads) * recurrence_flops(spec.rule, spec.key_dim, spec.value_dim);
}
double mixing(const SsdSpec& spec, int64_t /*length*/) {
  return static_cast<double>(spec.heads) * recurrence_flops(SsdSpec::rule(), spec.state, spec.head_dim);
}
// An element's decay (1, from an exponential or a product and a difference), its write (2) and its read (2).
double mixing(const SelectiveSpec& spec, int64_t /*length*/) {
  return 7 * static_cast<double>(spec.state * spec.inner);
}
double mixing(const MesaSpec& spec, int64_t /*length*/) {
  const double K = static_cast<double>(spec.dim),
               solve = spec.cg_steps > 0 ? 2 * K * K * static_cast<double>(spec.cg_steps) : K * K * K / 3;
  return mixing(MesaSpec::rule(), 2 * spec.heads * spec.dim * spec.dim) +
         static_cast<double>(spec.heads) * (solve + 3 * K * K);
}

double mixing(const Rwkv7Spec& spec, int64_t /*length*/) {
  return static_cast<double>(spec.heads()) * recurrence_flops(Rwkv7Spec::rule(), spec.dim, spec.dim);
}

// Scores and sums of the latent.
double mixing(const MlaSpec& spec, int64_t length) {
  return 4 * static_cast<double>(spec.heads * spec.latent()) * (static_cast<double>(length) + 1) / 2;
}

// The rows of a token each decay, write and read, and meet each other.
double mixing(const Mamba3Spec& spec, int64_t /*length*/) {
  const auto R = static_cast<double>(spec.rank()), heads = static_cast<double>(spec.heads);
  return heads * (R * recurrence_flops(SsdSpec::rule(), spec.state, spec.head_dim) +
                  2 * R * R * static_cast<double>(spec.state + spec.head_dim));
}

// Matrices [out, in] that a token passes, and the maps of its heads.
double products(const std::vector<ParamSpec>& list, int64_t heads) {
  double n = 0;
  for (const ParamSpec& p : list) {
    if (p.shape.size() < 2) continue;
    n += static_cast<double>(p.size()) *
         (p.name.find("feature_map") != std::string::npos ? static_cast<double>(heads) : 1.0);
  }
  return 2 * n;
}

double mlp_products(const MlpSpec& spec) {
  double n = 0;
  for (const ParamSpec& p : mlp_parameters(spec, "")) {
    if (p.shape.size() < 2) continue;
    const RouterShape& router = spec.experts.router;
    const double share = p.stacked ? static_cast<double>(router.chosen) / static_cast<double>(router.experts) : 1.0;
    n += share * static_cast<double>(p.size());
  }
  return 2 * n;
}

}  // namespace

ModelCost cost_of(const ModelConfig& config, int64_t length) {
  ModelCost cost;
  cost.parameters = parameter_count(config);
  cost.active_parameters = active_parameter_count(config);
  cost.flops_token = 2 * static_cast<double>(config.hidden_size * config.vocab_size);  // of the head
  const int64_t dense = config.dense_layers(), with_experts = config.num_hidden_layers - dense;
  if (dense > 0) cost.flops_token += static_cast<double>(dense) * mlp_products(config.mlp_spec(0));
  if (with_experts > 0)
    cost.flops_token += static_cast<double>(with_experts) * mlp_products(config.mlp_spec(config.num_hidden_layers - 1));
  // Mixers of an entry of the list are alike.
  const auto entries = std::max<int64_t>(static_cast<int64_t>(config.layers.size()), 1);
  for (int64_t i = 0; i < std::min(entries, config.num_hidden_layers); ++i) {
    // The first may differ from the others, which are alike.
    const int64_t count = (config.num_hidden_layers - i + entries - 1) / entries, other = count > 1 ? i + entries : i;
    const auto times = static_cast<double>(count);
    const MixerSpec spec = config.layer_spec(i), other_spec = config.layer_spec(other);
    const double mixer = std::visit([&](const auto& s) { return mixing(s, length); }, spec);
    (is_recurrence(config.layer_kind(i)) ? cost.flops_recurrence : cost.flops_attention) += times * mixer;
    cost.flops_token += times * mixer + products(mixer_parameters(spec, ""), config.num_heads) +
                        (times - 1) * products(mixer_parameters(other_spec, ""), config.num_heads);
    for (const StateTensor& tensor : config.layer_state(i)) {
      const double bytes = sizeof(float) * times * static_cast<double>(tensor.size());
      if (tensor.kind == StateKind::kCache) {
        cost.state_bytes_token += bytes / static_cast<double>(tensor.shape[0]);
      } else {
        cost.state_bytes += bytes;
      }
    }
  }
  return cost;
}

}  // namespace fw
