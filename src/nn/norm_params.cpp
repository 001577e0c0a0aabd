// The parameters of a norm, apart from its kernels: readers of configurations need no more.
#include "nn/init.h"
#include "nn/norm.h"

namespace fw {

std::vector<ParamSpec> norm_parameters(const NormSpec& spec, const std::string& name) {
  std::vector<ParamSpec> list = {{name + ".weight", {spec.size}, constant_init(spec.zero_centered ? 0.0 : 1.0), false}};
  list[0].zero_centered = spec.zero_centered;
  if (spec.kind == NormKind::kLayer) list.push_back({name + ".bias", {spec.size}, constant_init(0.0), false});
  return list;
}

}  // namespace fw
