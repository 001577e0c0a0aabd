// The parameters and the state of a gated convolution, apart from its kernels: readers of configurations need no more.
#include <cmath>

#include "nn/conv_mixer.h"

namespace fw {

std::vector<ParamSpec> mixer_parameters(const ConvSpec& spec, const std::string& prefix) {
  const int64_t d = spec.hidden;
  return {
      {prefix + "conv.weight",
       {d, 1, spec.kernel},
       uniform_init(1.0 / std::sqrt(static_cast<double>(spec.kernel))),
       true},
      {prefix + "conv.bias", {d}, constant_init(0.0), false},
      {prefix + "projection.weight", {d, d}, projection_init(spec.init, d, d), true},
      {prefix + "projection.bias", {d}, constant_init(0.0), false},
  };
}

std::vector<StateTensor> mixer_state(const ConvSpec& spec) {
  if (spec.kernel < 2) return {};
  return {tail_tensor("tail", spec.kernel - 1, spec.hidden)};
}

}  // namespace fw
