// Released hybrids of transformers (hf_types.h): Qwen3.5 and OLMo hybrid. Their configurations list the kind of every
// layer (layer_types), and their files name the parts of a layer by its kind.
#pragma once

#include <string_view>

#include "model/config.h"
#include "model/interop/hf_keys.h"
#include "model/interop/hf_tensor.h"

namespace fw::hf {

// ---- what their readers have in common, for other hybrids too
// Throws Error(kUsage) for a size outside of 1 to 2^24. validate() has the exact limits.
void check_count(const Keys& keys, const char* key, int64_t value);
// layer_types ("linear_attention" is recurrent, "full_attention" attention), or every full_attention_interval-th layer.
void read_layer_types(const Keys& keys, ModelConfig& c);
Json write_layer_types(const ModelConfig& c);
// The rotary embedding of attention layers: rope_parameters and the older keys beside it. A null rope_theta in
// rope_parameters is no rotation.
void read_rope(const Keys& keys, AttentionKeys& a, double fraction);
// num_attention_heads, num_key_value_heads, head_dim.
void read_attention_heads(const Keys& keys, ModelConfig& c, int64_t heads, int64_t kv_heads, int64_t head_dim);
// linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim: a
// gated delta rule.
struct LinearDefaults {
  int64_t key_heads, value_heads, key_dim, value_dim;
};
void read_linear_heads(const Keys& keys, ModelConfig& c, const LinearDefaults& standard);
void write_linear_heads(const ModelConfig& c, Json& json);
// What follows "model.layers.I." in a parameter's name, and I; "" and -1 for a name of no layer.
struct LayerName {
  int64_t layer = -1;
  std::string_view part;
};
LayerName layer_name(std::string_view name);

// Qwen3.5's layers, whatever follows their mixers.
struct QwenDefaults {
  int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim;
};
void read_qwen_layers(const Keys& keys, ModelConfig& c, const QwenDefaults& standard);
// A model with a vision tower: the text model is in text_config, which `read` reads, the rest is left aside.
void read_with_vision(const Keys& keys, ModelConfig& c, void (*read)(const Keys&, ModelConfig&));

// ---- the types
void read_qwen3_5_text(const Keys& keys, ModelConfig& c);
void write_qwen3_5_text(const ModelConfig& c, Json& json);
HfTensor qwen3_5_tensor(const ModelConfig& c, const ParamSpec& spec);
// As the multimodal model has it.
HfTensor qwen3_5_nested_tensor(const ModelConfig& c, const ParamSpec& spec);
void read_qwen3_5(const Keys& keys, ModelConfig& c);

void read_olmo_hybrid(const Keys& keys, ModelConfig& c);
void write_olmo_hybrid(const ModelConfig& c, Json& json);
HfTensor olmo_hybrid_tensor(const ModelConfig& c, const ParamSpec& spec);
// As the first releases have it: three convolutions, and norms of recurrent layers by other names.
HfTensor olmo_hybrid_first_tensor(const ModelConfig& c, const ParamSpec& spec);

}  // namespace fw::hf
