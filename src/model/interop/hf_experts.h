// Released models with experts (hf_types.h): Qwen3-Next, Qwen3.5's mixtures of experts and Kimi Linear.
#pragma once

#include "model/config.h"
#include "model/interop/hf_keys.h"
#include "model/interop/hf_tensor.h"

namespace fw::hf {

// Qwen3.5's layers with experts: every token passes the shared one behind a sigmoid gate too.
void read_qwen3_5_moe_text(const Keys& keys, ModelConfig& c);
void write_qwen3_5_moe_text(const ModelConfig& c, Json& json);
void read_qwen3_5_moe(const Keys& keys, ModelConfig& c);  // with a vision tower

// The same layers; the recurrent ones' projections lie together in two tensors.
void read_qwen3_next(const Keys& keys, ModelConfig& c);
void write_qwen3_next(const ModelConfig& c, Json& json);
HfTensor qwen3_next_tensor(const ModelConfig& c, const ParamSpec& spec);

// KDA and latent attention without positions; a sigmoid router whose choice has a bias. Its published configuration
// has the KDA layers' keys in linear_attn_config.
void read_kimi_linear(const Keys& keys, ModelConfig& c);
void write_kimi_linear(const ModelConfig& c, Json& json);
HfTensor kimi_linear_tensor(const ModelConfig& c, const ParamSpec& spec);
// As it is published: three convolutions, the forget gate's parameters beside the others, experts in block_sparse_moe.
HfTensor kimi_linear_published_tensor(const ModelConfig& c, const ParamSpec& spec);

}  // namespace fw::hf
