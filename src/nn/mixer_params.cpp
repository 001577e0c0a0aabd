// Which projections and parameters a recurrent mixer has: a function of the rule's axes (recurrence.md section 7).
#include <algorithm>
#include <cmath>

#include "nn/recurrent_mixer.h"

namespace fw {

std::vector<const Projection*> Projections::in_order() const {
  return {
      &q, &k, &v, &decay, &erase, &erase_write, &write, &gate, &precond_decay, &precond_beta,
#define FW_TOKEN_SCALAR(name, neutral, used) &name,
#include "rule/tokens.def"
  };
}

Projections::Projections(const RecurrentMixerSpec& spec) {
  const Rule& rule = spec.rule;
  const auto add = [this](Projection& p, const char* name, int64_t size) {
    p = {name, columns, size};
    columns += size;
  };
  add(q, "q_proj.weight", spec.key_size());
  if (rule.uses_k()) add(k, "k_proj.weight", spec.key_size());
  add(v, "v_proj.weight", spec.value_size());
  const bool channel_decay = rule.decay == Decay::kChannel;
  const int64_t decay_width =
      channel_decay ? (spec.decay_rank > 0 ? spec.decay_rank : spec.decay_heads() * spec.key_dim) : 0;
  if (channel_decay) add(decay, spec.decay_rank > 0 ? "f_proj.0.weight" : "f_proj.weight", decay_width);
  if (rule.uses_erase_gate() && rule.erase != Gate::kScalar) add(erase, "b_proj.weight", spec.key_size());
  if (spec.makes_erase_write()) add(erase_write, "e_proj.weight", spec.key_size());
  if (rule.uses_write_gate() && rule.write != Gate::kScalar) add(write, "w_proj.weight", spec.value_size());
  if (spec.gate != GateKind::kNone) {
    add(gate, spec.gate_rank > 0 ? "g_proj.0.weight" : "g_proj.weight",
        spec.gate_rank > 0 ? spec.gate_rank : spec.value_size());
  }
  if (rule.uses_erase_gate() && rule.erase == Gate::kScalar && !spec.derives_erase_gate())
    add(erase, "b_proj.weight", spec.v_heads);
  if (rule.uses_write_gate() && rule.write == Gate::kScalar) add(write, "w_proj.weight", spec.v_heads);
  if (spec.projects_gain()) add(beta, erase.used() ? "beta_proj.weight" : "b_proj.weight", spec.v_heads);
  if (rule.decay == Decay::kScalar && spec.projects_decay()) add(decay, "a_proj.weight", spec.v_heads);
  if (rule.uses_lambda()) add(lambda, "l_proj.weight", spec.v_heads);
  if (spec.projects_precond()) {
    add(precond_decay, "a_atk_proj.weight", spec.heads);
    add(precond_beta, "b_atk_proj.weight", spec.heads);
  }
}

std::vector<ParamSpec> mixer_parameters(const RecurrentMixerSpec& spec, const std::string& prefix) {
  const Rule& rule = spec.rule;
  const int64_t d = spec.hidden;
  std::vector<ParamSpec> list;
  const auto matrix = [&](const std::string& name, int64_t out, int64_t in) {
    list.push_back({prefix + name, {out, in}, projection_init(spec.init, out, in), true});
  };
  const auto vector = [&](const std::string& name, int64_t size, Initialiser init) {
    list.push_back({prefix + name, {size}, std::move(init), false});
  };

  // The stack: one after the other, in the order of the projections' columns, so that together they are one [columns,
  // d] matrix.
  const Projections projections(spec);
  std::vector<const Projection*> stack;
  for (const Projection* p : projections.in_order()) {
    if (p->used()) stack.push_back(p);
  }
  std::sort(stack.begin(), stack.end(), [](const Projection* a, const Projection* b) { return a->begin < b->begin; });
  for (const Projection* p : stack) {
    matrix(p->name, p->size, d);
    list.back().continues = p->begin > 0;
  }

  // The convolutions likewise: one [conv_channels(), W] weight.
  if (spec.conv_size > 0) {
    const Initialiser init = uniform_init(1.0 / std::sqrt(static_cast<double>(spec.conv_size)));
    list.push_back({prefix + "q_conv1d.weight", {spec.key_size(), 1, spec.conv_size}, init, true});
    if (rule.uses_k())
      list.push_back({prefix + "k_conv1d.weight", {spec.key_size(), 1, spec.conv_size}, init, true, true});
    list.push_back({prefix + "v_conv1d.weight", {spec.value_size(), 1, spec.conv_size}, init, true, true});
  }

  const double a_low = rule.decay == Decay::kChannel ? 1.0 : 0.0;
  if (rule.decay == Decay::kScalar && spec.projects_decay()) {
    vector("A_log", spec.v_heads, decay_a_init(a_low));
    vector("dt_bias", spec.v_heads, decay_delta_init());
  } else if (rule.decay == Decay::kChannel) {
    const int64_t channels = spec.decay_heads() * spec.key_dim;
    if (spec.decay_rank > 0) matrix("f_proj.1.weight", channels, spec.decay_rank);
    if (spec.bounded_layer >= 0) {
      // The model has the bounds.
    } else if (spec.log_sigmoid_decay) {
      vector(spec.decay_rank > 0 ? "f_proj.1.bias" : "f_proj.bias", channels, constant_init(0.0));
    } else {
      vector("A_log", spec.decay_heads(), decay_a_init(a_low));
      vector("dt_bias", channels, decay_delta_init());
    }
  }
  if (rule.uses_beta() && spec.gain.learned) vector("gain", 1, constant_init(0.0));
  if (rule.uses_lambda()) vector("l_bias", 1, constant_init(-0.8));
  if (spec.uses_inner_decay()) vector("decay", spec.heads, constant_init(1.0));
  if (spec.makes_erase_write())
    vector("e_norm.weight", spec.key_dim, constant_init(1.0 / std::sqrt(static_cast<double>(spec.key_dim))));
  if (rule.uses_read_correction() || spec.raw_read_correction) vector("D", spec.heads, constant_init(0.02));
  if (rule.uses_precond()) {
    if (spec.projects_precond()) {
      vector("A_log_atk", spec.heads, decay_a_init(a_low));
      vector("dt_bias_atk", spec.heads, decay_delta_init());
    }
    if (rule.uses_precond_center()) vector("log_atk_scale", spec.heads, constant_init(-0.2));
  }
  if (spec.gate != GateKind::kNone && spec.gate_rank > 0) {
    matrix("g_proj.1.weight", spec.value_size(), spec.gate_rank);
    if (spec.gate_bias) vector("g_proj.1.bias", spec.value_size(), constant_init(0.0));
  }
  const std::vector<ParamSpec> maps = query_key_parameters(spec.query_key, prefix);
  list.insert(list.end(), maps.begin(), maps.end());
  vector("o_norm.weight", spec.norm_size(), constant_init(1.0));
  matrix("o_proj.weight", d, spec.value_size());
  return list;
}

ParamSpec decay_bounds_parameter(int64_t layers, int64_t channels) {
  ParamSpec spec = {kDecayBounds, {layers, channels}, constant_init(0.0), true};
  spec.fp32_param = true;
  return spec;
}

RecurrenceShape recurrence_of(const RecurrentMixerSpec& spec) {
  return {spec.rule, spec.heads, spec.v_heads, spec.key_dim, spec.value_dim};
}

std::vector<StateTensor> mixer_state(const RecurrentMixerSpec& spec) {
  std::vector<StateTensor> list = {{"s", StateKind::kMatrix, {spec.v_heads, spec.key_dim, spec.value_dim}, true, true}};
  list[0].recurrence = recurrence_of(spec);
  if (spec.rule.uses_precond()) list.push_back({"a", StateKind::kMatrix, {spec.heads, spec.key_dim}, true});
  for (StateTensor& tensor : list) tensor.takes_back = TakesBack::kSlots;
  if (spec.conv_size > 1) list.push_back(tail_tensor("tail", spec.conv_size - 1, spec.conv_channels()));
  return list;
}

std::vector<ParamSpec> query_key_parameters(const QueryKeySpec& spec, const std::string& prefix) {
  std::vector<ParamSpec> list;
  if (spec.map != FeatureMap::kProduct) return list;
  const int64_t K = spec.key_dim;
  for (const char* name :
       {"feature_map_q.layer1", "feature_map_q.layer2", "feature_map_k.layer1", "feature_map_k.layer2"}) {
    list.push_back({prefix + name + ".weight", {K, K}, projection_init(spec.init, K, K), true});
    list.push_back({prefix + name + ".bias", {K}, constant_init(0.0), false});
  }
  return list;
}

}  // namespace fw
