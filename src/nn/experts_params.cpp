// The parameters of a mixture of experts, apart from its kernels: readers of configurations need no more.
#include "nn/experts.h"

namespace fw {

MlpSpec shared_expert_spec(const MlpSpec& spec) {
  MlpSpec shared = spec;
  shared.kind = MlpKind::kSwiglu;
  shared.size = spec.experts.shared_size;
  return shared;
}

std::vector<ParamSpec> experts_parameters(const MlpSpec& spec, const std::string& prefix) {
  const ExpertsSpec& of = spec.experts;
  const int64_t d = spec.hidden, m = of.size, E = of.router.experts;
  std::vector<ParamSpec> list = {{prefix + "gate.weight", {E, d}, projection_init(spec.init, E, d), true}};
  if (of.correction_bias) {
    list.push_back({prefix + "gate.e_score_correction_bias", {E}, constant_init(0.0), false});
    list.back().buffer = true;
  }
  list.push_back({prefix + "experts.gate_up_proj", {E, 2 * m, d}, projection_init(spec.init, m, d), true});
  list.back().stacked = true;
  list.push_back({prefix + "experts.down_proj", {E, d, m}, projection_init(spec.init, d, m), true});
  list.back().stacked = true;
  if (of.shared_size == 0) return list;
  for (ParamSpec& shared : mlp_parameters(shared_expert_spec(spec), prefix + "shared_expert."))
    list.push_back(std::move(shared));
  if (of.shared_gate)
    list.push_back({prefix + "shared_expert_gate.weight", {1, d}, projection_init(spec.init, 1, d), true});
  return list;
}

}  // namespace fw
