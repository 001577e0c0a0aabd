// The parameters and the state of a Mesa layer, apart from its kernels: readers of configurations need no more.
#include <cmath>

#include "nn/mesa_mixer.h"

namespace fw {

Rule MesaSpec::rule() { return parse_rule("mamba2 write=scalar"); }

std::vector<ParamSpec> mixer_parameters(const MesaSpec& spec, const std::string& prefix) {
  std::vector<ParamSpec> list;
  const auto matrix = [&](const char* name, int64_t out, int64_t in, bool continues = false) {
    list.push_back({prefix + name, {out, in}, projection_init(spec.init, out, in), true, continues});
  };
  const auto vector = [&](const char* name, int64_t size, double value) {
    list.push_back({prefix + name, {size}, constant_init(value), false});
  };
  matrix("q_proj.weight", spec.size(), spec.hidden);
  matrix("k_proj.weight", spec.size(), spec.hidden, true);
  matrix("v_proj.weight", spec.size(), spec.hidden, true);
  if (spec.gate != GateKind::kNone) matrix("g_proj.weight", spec.size(), spec.hidden, true);
  matrix("a_proj.weight", spec.heads, spec.hidden);
  vector("a_proj.bias", spec.heads, 0.0);
  matrix("b_proj.weight", spec.heads, spec.hidden);
  vector("b_proj.bias", spec.heads, 0.0);
  const Initialiser conv = uniform_init(1.0 / std::sqrt(static_cast<double>(spec.conv_size)));
  list.push_back({prefix + "q_conv1d.weight", {spec.size(), 1, spec.conv_size}, conv, true});
  list.push_back({prefix + "k_conv1d.weight", {spec.size(), 1, spec.conv_size}, conv, true, true});
  // lambda = 1 at first.
  vector("lambda_params", spec.size(), spec.least_lambda < 1 ? std::log(std::expm1(1 - spec.least_lambda)) : 0.0);
  vector("o_norm.weight", spec.dim, 1.0);
  matrix("o_proj.weight", spec.hidden, spec.size());
  return list;
}

std::vector<StateTensor> mixer_state(const MesaSpec& spec) {
  std::vector<StateTensor> list = {{"s", StateKind::kMatrix, {spec.heads, spec.dim, 2 * spec.dim}, true}};
  if (spec.conv_size > 1) list.push_back({"tail", StateKind::kMatrix, {spec.conv_size - 1, 2 * spec.size()}});
  return list;
}

}  // namespace fw
