// The parameters and the state of attention, apart from its kernels: readers of configurations need no more.
#include "nn/attention_mixer.h"

namespace fw {

std::vector<ParamSpec> mixer_parameters(const AttentionSpec& spec, const std::string& prefix) {
  std::vector<ParamSpec> list;
  const int64_t d = spec.hidden;
  std::vector<std::pair<std::string, int64_t>> stack = {
      {"q_proj", spec.query_size()}, {"k_proj", spec.kv_size()}, {"v_proj", spec.kv_size()}};
  if (spec.output_gate) stack.emplace_back("g_proj", spec.query_size());
  // One after the other, so that together they are one [columns, d] matrix and one [columns] bias.
  for (const auto& [name, size] : stack) {
    list.push_back(
        {prefix + name + ".weight", {size, d}, projection_init(spec.init, size, d), true, name != stack[0].first});
  }
  for (const auto& [name, size] : stack) {
    if (spec.qkv_bias)
      list.push_back({prefix + name + ".bias", {size}, constant_init(0.0), false, name != stack[0].first});
  }
  if (spec.qk_norm) {
    const Initialiser init = constant_init(spec.qk_norm_zero_centered ? 0.0 : 1.0);
    list.push_back({prefix + "q_norm.weight", {spec.q_norm_size()}, init, false});
    list.back().zero_centered = spec.qk_norm_zero_centered;
    list.push_back({prefix + "k_norm.weight", {spec.k_norm_size()}, init, false});
    list.back().zero_centered = spec.qk_norm_zero_centered;
  }
  list.push_back(
      {prefix + "o_proj.weight", {d, spec.query_size()}, projection_init(spec.init, d, spec.query_size()), true});
  return list;
}

std::vector<StateTensor> mixer_state(const AttentionSpec& spec) {
  const StateKind kind = spec.window > 0 ? StateKind::kRing : StateKind::kCache;
  const int64_t rows = spec.window > 0 ? spec.window : kCacheRows;
  return {{"k", kind, {rows, spec.kv_size()}}, {"v", kind, {rows, spec.kv_size()}}};
}

}  // namespace fw
