// The parameters and the state of a Mamba-3 layer, apart from its kernels: readers of configurations need no more.
#include "nn/mamba3_mixer.h"

namespace fw {

std::vector<ParamSpec> mixer_parameters(const Mamba3Spec& spec, const std::string& prefix) {
  const int64_t H = spec.heads, R = spec.rank(), N = spec.state, P = spec.head_dim;
  std::vector<ParamSpec> list = {
      {prefix + "dt_bias", {H}, decay_delta_init(), false},
      {prefix + "D", {H}, constant_init(1.0), false},
      {prefix + "B_bias", {H, R, N}, constant_init(1.0), true},
      {prefix + "C_bias", {H, R, N}, constant_init(1.0), true},
      {prefix + "in_proj.weight",
       {spec.columns(), spec.hidden},
       projection_init(spec.init, spec.columns(), spec.hidden),
       true},
      {prefix + "B_norm.weight", {N}, constant_init(1.0), false},
      {prefix + "C_norm.weight", {N}, constant_init(1.0), false},
      {prefix + "out_proj.weight",
       {spec.hidden, spec.inner()},
       projection_init(spec.init, spec.hidden, spec.inner()),
       true},
  };
  if (spec.mimo_rank > 0) {
    const double share = 1.0 / static_cast<double>(R);
    list.push_back({prefix + "mimo_x", {H, R, P}, constant_init(share), true});
    list.push_back({prefix + "mimo_z", {H, R, P}, constant_init(1.0), true});
    list.push_back({prefix + "mimo_o", {H, R, P}, constant_init(share), true});
  }
  if (spec.output_norm) list.push_back({prefix + "norm.weight", {spec.inner()}, constant_init(1.0), false});
  return list;
}

std::vector<StateTensor> mixer_state(const Mamba3Spec& spec) {
  const int64_t H = spec.heads, R = spec.rank(), N = spec.state, P = spec.head_dim;
  return {{"s", StateKind::kMatrix, {H, N, P}, true},
          {"k", StateKind::kMatrix, {R, H * N}},
          {"v", StateKind::kMatrix, {R, H * P}},
          {"angle", StateKind::kMatrix, {2, H * spec.angles}, true}};
}

}  // namespace fw
