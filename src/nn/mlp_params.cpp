// The parameters of what follows a mixer, apart from its kernels: readers of configurations need no more.
#include <cmath>

#include "nn/experts.h"

namespace fw {

std::vector<ParamSpec> mlp_parameters(const MlpSpec& spec, const std::string& prefix) {
  const int64_t d = spec.hidden, m = spec.size;
  if (m == 0) return {};
  if (spec.kind == MlpKind::kExperts) return experts_parameters(spec, prefix);
  if (spec.kind == MlpKind::kChannelMix) {
    const double depth = 1.0 - static_cast<double>(spec.layer) / static_cast<double>(spec.layers),
                 power = std::pow(depth, 4);
    return {
        {prefix + "x_k",
         {d},
         index_init([=](double n) { return 1.0 - std::pow(n / static_cast<double>(d), power); }),
         false},
        {prefix + "key.weight", {m, d}, uniform_init(0.5 / std::sqrt(static_cast<double>(d))), true},
        {prefix + "value.weight", {d, m}, constant_init(0.0), true},
    };
  }
  // With PyTorch's first weights goes what the published programs that have them do to the residual stream
  // (Kaczmarz's): the output over sqrt(2 layers).
  const int64_t inputs = spec.init == InitScheme::kTorch ? 2 * spec.layers * m : m;
  return {
      {prefix + "gate_proj.weight", {m, d}, projection_init(spec.init, m, d), true},
      {prefix + "up_proj.weight", {m, d}, projection_init(spec.init, m, d), true, true},
      {prefix + "down_proj.weight", {d, m}, projection_init(spec.init, d, inputs), true},
  };
}

std::vector<StateTensor> mlp_state(const MlpSpec& spec) {
  if (spec.size == 0 || spec.kind != MlpKind::kChannelMix) return {};
  return {tail_tensor("mlp_shift", 1, spec.hidden)};
}

}  // namespace fw
