// The parameters and the state of multi-head latent attention, apart from its kernels: readers of configurations need
// no more.
#include "nn/mla_mixer.h"

namespace fw {

std::vector<ParamSpec> mixer_parameters(const MlaSpec& spec, const std::string& prefix) {
  const int64_t d = spec.hidden;
  std::vector<ParamSpec> list;
  const auto matrix = [&](const char* name, int64_t out, int64_t in) {
    list.push_back({prefix + name, {out, in}, projection_init(spec.init, out, in), true});
  };
  // One after the other, so that together they are one [columns, d] matrix.
  matrix("q_proj.weight", spec.query_size(), d);
  matrix("kv_a_proj_with_mqa.weight", spec.latent(), d);
  list.back().continues = true;
  list.push_back({prefix + "kv_a_layernorm.weight", {spec.rank}, constant_init(1.0), false});
  matrix("kv_b_proj.weight", spec.expanded(), spec.rank);
  matrix("o_proj.weight", d, spec.value_size());
  return list;
}

std::vector<StateTensor> mixer_state(const MlaSpec& spec) {
  return {{"latent", StateKind::kCache, {kCacheRows, spec.latent()}}};
}

}  // namespace fw
