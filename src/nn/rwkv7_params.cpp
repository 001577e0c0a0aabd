// The parameters and the state of a layer of RWKV-7, apart from its kernels: readers of configurations need no more.
#include <algorithm>
#include <cmath>

#include "nn/init.h"
#include "nn/rwkv7_mixer.h"

namespace fw {

Rule Rwkv7Spec::rule() { return parse_rule("dplr"); }

std::vector<ParamSpec> mixer_parameters(const Rwkv7Spec& spec, const std::string& prefix) {
  const int64_t d = spec.hidden;
  const auto width = static_cast<double>(d), last = std::max(width - 1, 1.0), dim = static_cast<double>(spec.dim);
  const auto layer = static_cast<double>(spec.layer), layers = static_cast<double>(spec.layers);
  const double depth = layers > 1 ? layer / (layers - 1) : 0, left = 1 - layer / layers;  // 0 to 1; 1 to almost 0
  // Of a channel: from -1/2 to 1/2 over all; from -1 to 1 over a head, squared with its sign.
  const auto linear = [=](double n) { return n / last - 0.5; };
  const auto zigzag = [=](double n) {
    const double half = std::max((dim - 1) / 2, 0.5), x = (std::fmod(n, dim) - (dim - 1) / 2) / half;
    return x * std::abs(x);
  };

  std::vector<ParamSpec> list;
  const auto at = [&](const char* name, std::vector<int64_t> shape, Initialiser init, bool decays = false,
                      bool continues = false) {
    list.push_back({prefix + name, std::move(shape), std::move(init), decays, continues});
  };
  const auto mix = [&](const char* name, double power) {
    at(name, {1, 1, d}, index_init([=](double n) { return 1 - std::pow(n / width, power * left); }), false,
       !list.empty());
  };
  mix("x_r", 0.2);
  mix("x_w", 0.9);
  mix("x_k", 0.7);
  mix("x_v", 0.7);
  mix("x_a", 0.9);
  mix("x_g", 0.2);
  at("k_k", {d}, index_init([=](double n) { return 0.71 - 0.1 * linear(n); }));
  at("k_a", {d}, constant_init(1.02));
  at("r_k", {spec.heads(), spec.dim}, constant_init(-0.04));
  list.back().fp32_param = true;
  const double bound = 1 / std::sqrt(width);
  at("r_proj.weight", {d, d}, uniform_init(0.5 * bound), true);
  at("k_proj.weight", {d, d}, uniform_init(0.05 * bound), true);
  at("v_proj.weight", {d, d}, uniform_init(0.5 * bound), true);
  at("o_proj.weight", {d, d}, constant_init(0.0), true);
  // The first factor begins at 0, so that a gate is its bias; the second with values as large as a tenth of an
  // orthogonal matrix's.
  const auto low_rank = [&](const std::string& name, int64_t rank, const Initialiser& bias) {
    at((name + ".lora.0.weight").c_str(), {rank, d}, constant_init(0.0));
    at((name + ".lora.2.weight").c_str(), {d, rank}, normal_init(0.1 * bound));
    if (bias) at((name + ".lora.2.bias").c_str(), {d}, bias);
  };
  low_rank("w_lora", spec.decay_rank, index_init([=](double n) {
             return 6 * std::pow(n / last, 1 + std::pow(depth, 0.3)) - 5.5 + 2.5 * zigzag(n);
           }));
  if (!spec.first) low_rank("v_lora", spec.value_rank, index_init([=](double n) { return 0.73 - 0.4 * linear(n); }));
  low_rank("a_lora", spec.rate_rank, index_init([=](double n) { return 0.3 * zigzag(n) + 0.4 * linear(n) - 0.19; }));
  low_rank("g_lora", spec.gate_rank, {});
  at("g_norm.weight", {d}, constant_init(std::pow((layer + 1) / layers, 0.7)));
  at("g_norm.bias", {d}, constant_init(0.0));
  return list;
}

RecurrenceShape recurrence_of(const Rwkv7Spec& spec) {
  RecurrenceShape shape;
  shape.rule = Rwkv7Spec::rule();
  shape.heads = shape.v_heads = spec.heads();
  shape.key_dim = shape.value_dim = spec.dim;
  shape.scale = Rwkv7Spec::kScale;
  return shape;
}

std::vector<StateTensor> mixer_state(const Rwkv7Spec& spec) {
  StateTensor states{"s", StateKind::kMatrix, {spec.heads(), spec.dim, spec.dim}, true};
  states.recurrence = recurrence_of(spec);
  states.takes_back = TakesBack::kSlots;
  return {states, tail_tensor("shift", 1, spec.hidden)};
}

}  // namespace fw
