#include "model/device_limits.h"

#include <fmt/format.h>

#include <string_view>
#include <variant>

#include "base/error.h"
#include "ops/backend.h"
#include "scan/backend.h"

namespace fw {
namespace {

void require_at_most(std::string_view what, int64_t most, int64_t got) {
  if (got > most) fail_usage("device: expected the CPU, or {} of at most {} on CUDA devices, got {}", what, most, got);
}

void require_shape(const MixerSpec& spec, const LayerLimits& limits) {
  if (const auto* mesa = std::get_if<MesaSpec>(&spec))
    require_at_most("Mesa layers with a head_dim", limits.mesa_key, mesa->dim);
  if (const auto* mla = std::get_if<MlaSpec>(&spec))
    require_at_most("latent attention with kv_rank + shared_key_dim", limits.attention_dim, mla->latent());
  const auto* mamba3 = std::get_if<Mamba3Spec>(&spec);
  if (mamba3 != nullptr && mamba3->mimo_rank > 0) {
    require_at_most("Mamba-3 layers with (2 mimo_rank + 1) head_dim", limits.mamba3_sums,
                    (2 * mamba3->rank() + 1) * mamba3->head_dim);
  }
}

}  // namespace

template <class T>
void require_layers(const ModelConfig& c, const Device& device) {
  for (const std::string& kind : c.layers) require_layer<T>(kind, device);
  const LayerLimits limits = layer_limits(device);
  if (c.mlp == "experts" && c.experts.num_experts > limits.experts) {
    fail_usage("device: expected the CPU, or at most {} experts of a layer on CUDA devices, got {}", limits.experts,
               c.experts.num_experts);
  }
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const MixerSpec spec = c.layer_spec(i);
    require_shape(spec, limits);
    const auto* recurrent = std::get_if<RecurrentMixerSpec>(&spec);
    if (recurrent == nullptr || device.kind() == FW_DEVICE_CPU) continue;
    if (const char* expected = cuda_backend().lacks(recurrent->rule, recurrent->heads, recurrent->v_heads)) {
      fail_usage("device: expected the CPU, or {}: the rule '{}' does not run on CUDA devices", expected,
                 c.layer_rule(i));
    }
  }
  if (c.norm_spec().kind == NormKind::kLayer) require_layer<T>("layernorm", device);
  if (c.mlp == "channel_mix" || c.mlp == "experts") require_layer<T>(c.mlp, device);
}

template void require_layers<float>(const ModelConfig&, const Device&);
template void require_layers<double>(const ModelConfig&, const Device&);
template void require_layers<Bf16>(const ModelConfig&, const Device&);

}  // namespace fw
