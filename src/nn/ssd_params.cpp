// The parameters and the state of Mamba-2's layer, apart from its kernels: readers of configurations need no more.
#include <cmath>

#include "nn/ssd_mixer.h"

namespace fw {

Rule SsdSpec::rule() { return parse_rule("mamba2 write=scalar"); }

std::vector<ParamSpec> mixer_parameters(const SsdSpec& spec, const std::string& prefix) {
  const Initialiser conv = uniform_init(1.0 / std::sqrt(static_cast<double>(spec.conv_size)));
  return {
      {prefix + "A_log", {spec.heads}, decay_a_init(1.0), false},
      {prefix + "D", {spec.heads}, constant_init(1.0), false},
      {prefix + "dt_bias", {spec.heads}, decay_delta_init(), false},
      {prefix + "in_proj.weight",
       {spec.columns(), spec.hidden},
       projection_init(spec.init, spec.columns(), spec.hidden),
       true},
      {prefix + "conv1d.weight", {spec.conv_channels(), 1, spec.conv_size}, conv, true},
      {prefix + "conv1d.bias", {spec.conv_channels()}, conv, false},
      {prefix + "norm.weight", {spec.inner()}, constant_init(1.0), false},
      {prefix + "out_proj.weight",
       {spec.hidden, spec.inner()},
       projection_init(spec.init, spec.hidden, spec.inner()),
       true},
  };
}

RecurrenceShape recurrence_of(const SsdSpec& spec) {
  return {SsdSpec::rule(), spec.groups, spec.heads, spec.state, spec.head_dim, FW_FORM_AUTO, 1.0};
}

std::vector<StateTensor> mixer_state(const SsdSpec& spec) {
  std::vector<StateTensor> list = {{"s", StateKind::kMatrix, {spec.heads, spec.state, spec.head_dim}, true}};
  list[0].recurrence = recurrence_of(spec);
  list[0].takes_back = TakesBack::kSlots;
  if (spec.conv_size > 1) list.push_back(tail_tensor("tail", spec.conv_size - 1, spec.conv_channels()));
  return list;
}

}  // namespace fw
