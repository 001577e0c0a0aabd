// What the configurations of several types of models have in common (hf_types.h): widths, heads, blocks, attention
// and convolution, read and written.
#pragma once

#include <initializer_list>

#include "base/error.h"
#include "model/config.h"
#include "model/interop/hf_keys.h"

namespace fw::hf {

// Two names of one function, and the names that programs have for the epsilon of the norms.
inline constexpr std::initializer_list<const char*> kSilu = {"swish", "silu"};
inline constexpr std::initializer_list<const char*> kNormEps = {"norm_eps", "layer_norm_epsilon", "rms_norm_eps",
                                                                "layer_norm_eps"};
inline constexpr double kTheta = 10000.0;  // of the rotary embedding

int64_t swiglu_width(const Keys& keys, int64_t hidden, double ratio);
// What all of them have.
void read_common(const Keys& keys, ModelConfig& c, int64_t hidden, int64_t layers, double ratio);
void read_heads(const Keys& keys, ModelConfig& c, int64_t heads, int64_t head_dim, double expand_v);
// The older layers say the widths of all heads together, in shares of the model's.
void read_shares(const Keys& keys, ModelConfig& c, int64_t heads, double expand_k, double expand_v);

// What the defaults of a model of state-space layers are: those of flash-linear-attention and of transformers differ,
// and both have the same model_type.
struct BlockDefaults {
  int64_t vocab = 32000, hidden = 2048, layers = 48;
  bool tied = false;
  int64_t groups = 1;
  bool transformers = false;
};
// Models of state-space layers, each block one layer.
void read_blocks(const Keys& keys, ModelConfig& c, const BlockDefaults& standard,
                 std::initializer_list<const char*> activations = kSilu);
// First values and the type of the residual stream, as both programs spell them.
void skip_first_values(const Keys& keys);
// Which program wrote a configuration of mamba or mamba2: its defaults.
BlockDefaults block_defaults(const Keys& keys, const BlockDefaults& fla, const BlockDefaults& transformers);
// [0, Infinity], as transformers writes it: every time step is let through.
void read_limit(const Keys& keys, const char* key);

// The base of the rotary embedding: rope_theta, or rope_parameters as transformers has it.
double read_theta(const Keys& keys);
// One attention layer, of a whole model or of the layers that `attn` names. Its heads are hidden_size / num_heads wide.
void read_attention(const Keys& keys, ModelConfig& c, AttentionKeys& a);
// The kind of those layers: with a window or without.
const char* read_attention_kind(const Keys& keys, ModelConfig& c);
// The attention of a model's layers, in `json` itself or in its `attn`.
void write_attention(const ModelConfig& c, LayerKind kind, Json& json);
void read_conv(const Keys& keys, ModelConfig& c);

void write_common(const ModelConfig& c, Json& json);
void write_blocks(const ModelConfig& c, Json& json);
void write_heads(const ModelConfig& c, Json& json);
void write_shares(const ModelConfig& c, Json& json);

}  // namespace fw::hf
