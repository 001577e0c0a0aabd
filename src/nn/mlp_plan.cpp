// The parameters of a SwiGLU MLP, apart from its kernels: readers of configurations need no more.
#include "nn/mlp.h"

namespace fw {

std::vector<ParamSpec> mlp_parameters(const MlpSpec& spec, const std::string& prefix) {
  const int64_t d = spec.hidden, m = spec.size;
  if (m == 0) return {};
  return {
      {prefix + "gate_proj.weight", {m, d}, projection_init(spec.init, m, d), true},
      {prefix + "up_proj.weight", {m, d}, projection_init(spec.init, m, d), true, true},
      {prefix + "down_proj.weight", {d, m}, projection_init(spec.init, d, m), true},
  };
}

}  // namespace fw
