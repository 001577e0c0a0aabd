// ModelConfig: everything config.json says about a model. JSON keys are flash-linear-attention's where it has one
// (hidden_size, num_hidden_layers, num_heads, num_v_heads, head_dim, expand_v, conv_size, intermediate_size,
// hidden_ratio, vocab_size, norm_eps, tie_word_embeddings, allow_neg_eigval), ours otherwise ("rule", "model_type":
// "fastweight"). The keys are a list, config.def. Configurations of that program itself are read by
// interop/hf_config.h.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/keys.h"
#include "nn/mixers.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "ops/ops.h"
#include "rule/rule.h"

namespace fw {

struct AttentionKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/attention.def"
#undef FW_KEY
  bool operator==(const AttentionKeys&) const = default;
};
struct WindowKeys : AttentionKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/window.def"
#undef FW_KEY
  bool operator==(const WindowKeys&) const = default;
};
struct ConvKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/conv.def"
#undef FW_KEY
  bool operator==(const ConvKeys&) const = default;
};

struct SsdKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/ssd.def"
#undef FW_KEY
  bool operator==(const SsdKeys&) const = default;
};

struct MambaKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/mamba.def"
#undef FW_KEY
  bool operator==(const MambaKeys&) const = default;
};

struct MesaKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/mesa.def"
#undef FW_KEY
  bool operator==(const MesaKeys&) const = default;
};

struct Rwkv7Keys {
#define FW_KEY FW_KEY_MEMBER
#include "model/rwkv7.def"
#undef FW_KEY
  bool operator==(const Rwkv7Keys&) const = default;
};

struct Mamba3Keys {
#define FW_KEY FW_KEY_MEMBER
#include "model/mamba3.def"
#undef FW_KEY
  bool operator==(const Mamba3Keys&) const = default;
};

struct MlaKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/mla.def"
#undef FW_KEY
  bool operator==(const MlaKeys&) const = default;
};

struct ExpertsKeys {
#define FW_KEY FW_KEY_MEMBER
#include "model/experts.def"
#undef FW_KEY
  bool operator==(const ExpertsKeys&) const = default;
};

enum class LayerKind {
  kRecurrent,
  kAttention,
  kWindow,
  kConv,
  kSsd,
  kMamba,
  kLonghornDiag,
  kMesa,
  kRwkv7,
  kMamba3,
  kMla
};
// Whether its cost grows with the tokens and its state does not.
bool is_recurrence(LayerKind kind);

struct ModelConfig {
#define FW_KEY FW_KEY_MEMBER
#include "model/config.def"
#undef FW_KEY
  AttentionKeys attention;  // of the layers called attention: all tokens before
  WindowKeys window;        // of those called window
  ConvKeys conv;            // of those called conv
  SsdKeys ssd;              // of those called ssd
  MambaKeys mamba;          // of those called mamba or longhorn_diag
  MesaKeys mesa;            // of those called mesa
  Rwkv7Keys rwkv7;          // of those called rwkv7
  Mamba3Keys mamba3;        // of those called mamba3
  MlaKeys mla;              // of those called mla
  ExpertsKeys experts;      // of the MLPs called experts
  // of a model that came from another program (interop/hf_config.h): its config.json and what else an export needs;
  // JSON, or ""
  std::string hf;

  Rule resolved_rule() const;  // with gain_bound and precond_x from above, validated
  int64_t v_heads() const { return num_v_heads > 0 ? num_v_heads : num_heads; }
  int64_t head_v_dim() const;
  int64_t mlp_size() const;      // of layers without experts
  int64_t dense_layers() const;  // first ones without experts, or all
  MlpSpec mlp_spec(int64_t layer) const;
  NormSpec norm_spec() const;
  NormPosition norm_position(int64_t layer) const;
  std::vector<StateTensor> layer_state(int64_t layer) const;  // of its mixer, then of its MLP
  GateKind gate_kind() const;
  InitScheme init_scheme() const;
  RecurrentMixerSpec mixer_spec() const;  // of a layer with a recurrence of `rule`; the config must be valid
  // A layer's entry of `layers`. These are kinds of their own: attention, window, conv, ssd, mamba, longhorn_diag,
  // mesa, rwkv7, mamba3 and mla. "recurrent" is `rule`. All else is a rule of its own (a preset or axes) with the other
  // keys of the model.
  LayerKind layer_kind(int64_t layer) const;
  std::string layer_rule(int64_t layer) const;  // of a recurrent layer
  bool has_recurrence() const;
  std::string mixers() const;  // for people: "gated_deltanet2 + window"
  MixerSpec layer_spec(int64_t layer) const;
  SsdSpec ssd_spec() const;
  SelectiveSpec selective_spec(ScanLaw law) const;
  MesaSpec mesa_spec() const;
  Rwkv7Spec rwkv7_spec(int64_t layer) const;
  Mamba3Spec mamba3_spec() const;
  MlaSpec mla_spec() const;
  int64_t first_rwkv7() const;  // the layer whose value the others of RWKV-7 mix with theirs; -1: there is none
  AttentionSpec attention_spec(const AttentionKeys& keys, int64_t window) const;

  bool operator==(const ModelConfig&) const = default;
};

// The keys of `config`, as tables of a run file, an object of JSON and options: [model] first.
KeyTables key_tables(ModelConfig& config);
// Throws Error(kUsage) naming the key, what was expected and what came. A valid config has at most 2^35 parameters,
// with experts 2^37, and 2^31 values in one tensor, so that a hostile file cannot ask for terabytes.
// Names of the tables of key_tables() that no layer of the model reads.
std::vector<std::string> unused_tables(const ModelConfig& config);
void validate(const ModelConfig& config);
// Number of parameters, without allocating any; sizes must be in the ranges that validate() accepts.
double parameter_count(const ModelConfig& config);
// Of those the ones that a token passes: of experts the chosen.
double active_parameter_count(const ModelConfig& config);
// Of the MLP of a layer, without its norm; of experts all, or the chosen.
double mlp_parameter_count(const MlpSpec& spec, bool active);
// Of all layers together, declared before theirs.
std::vector<ParamSpec> shared_parameters(const ModelConfig& config);
// Unknown keys are an error with the nearest known name. `where` names the file in messages. The result is validated.
ModelConfig config_from_json(const nlohmann::json& json, const std::string& where);
nlohmann::json config_to_json(const ModelConfig& config);

}  // namespace fw
