// The parameters and the state of the layers mamba and longhorn_diag, apart from their kernels: readers of
// configurations need no more.
#include <cmath>

#include "nn/selective_mixer.h"

namespace fw {
namespace {

// A = -(1, 2, ..., N) in every channel.
Initialiser decay_rows_init(int64_t state) {
  return [state](std::span<double> values, Random&) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = std::log(static_cast<double>(static_cast<int64_t>(i) % state + 1));
  };
}

}  // namespace

std::vector<ParamSpec> mixer_parameters(const SelectiveSpec& spec, const std::string& prefix) {
  const int64_t D = spec.inner;
  const bool mamba = spec.law == ScanLaw::kMamba;
  const Initialiser conv = uniform_init(1.0 / std::sqrt(static_cast<double>(spec.conv_size)));
  const Initialiser low_rank = uniform_init(1.0 / std::sqrt(static_cast<double>(spec.rank)));
  const std::string step = prefix + (mamba ? "dt_proj" : "dt_head");
  std::vector<ParamSpec> list;
  if (mamba) {
    list.push_back({prefix + "A_log", {D, spec.state}, decay_rows_init(spec.state), false});
    list.back().fp32_param = true;
  }
  const std::vector<ParamSpec> others = {
      {prefix + "D", {D}, constant_init(1.0), false},
      {prefix + "in_proj.weight", {2 * D, spec.hidden}, projection_init(spec.init, 2 * D, spec.hidden), true},
      {prefix + "conv1d.weight", {D, 1, spec.conv_size}, conv, true},
      {prefix + "conv1d.bias", {D}, conv, false},
      {prefix + "x_proj.weight", {spec.keys(), D}, projection_init(spec.init, spec.keys(), D), true},
      {step + ".weight", {D, spec.rank}, low_rank, true},
      {step + ".bias", {D}, mamba ? decay_delta_init() : constant_init(0.0), false},
      {prefix + "out_proj.weight", {spec.hidden, D}, projection_init(spec.init, spec.hidden, D), true},
  };
  list.insert(list.end(), others.begin(), others.end());
  return list;
}

std::vector<StateTensor> mixer_state(const SelectiveSpec& spec) {
  std::vector<StateTensor> list = {{"s", StateKind::kMatrix, {spec.state, spec.inner}, true}};
  if (spec.conv_size > 1) list.push_back({"tail", StateKind::kMatrix, {spec.conv_size - 1, spec.inner}});
  return list;
}

}  // namespace fw
