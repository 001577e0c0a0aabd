// ModelConfig: everything config.json says about a model. JSON keys are flash-linear-attention's where it has one
// (hidden_size, num_hidden_layers, num_heads, num_v_heads, head_dim, expand_v, conv_size, intermediate_size,
// hidden_ratio, vocab_size, norm_eps, tie_word_embeddings, allow_neg_eigval), ours otherwise ("rule", "model_type":
// "fastweight"). Configurations of that program itself are read by peer.h.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "nn/mixers.h"
#include "ops/ops.h"
#include "rule/rule.h"

namespace fw {

struct ModelConfig {
  std::string rule = "gated_deltanet2";  // parse_rule syntax: a preset or axes
  int64_t vocab_size = 256;
  int64_t hidden_size = 192;
  int64_t num_hidden_layers = 4;
  int64_t num_heads = 3;          // H
  int64_t num_v_heads = 0;        // HV; 0: num_heads
  int64_t head_dim = 64;          // K
  double expand_v = 1.0;          // V = expand_v * head_dim, must be whole
  int64_t conv_size = 4;          // 0: no short convolution, and no activation of q, k, v
  int64_t intermediate_size = 0;  // 0: 2/3 * hidden_ratio * hidden_size, rounded up to a multiple of 256 (64 below 512 wide)
  double hidden_ratio = 4.0;
  double norm_eps = 1e-5;
  bool tie_word_embeddings = true;
  bool allow_neg_eigval = false;        // the gate that multiplies the erase key (gain or erase gate) times 2
  std::string output_gate = "silu";     // silu | sigmoid | none
  int64_t output_gate_rank = 0;         // 0: full projection; else low rank, with bias on the second factor
  int64_t decay_rank = 0;               // channel decay: 0 full d -> HK, else d -> rank -> HK
  bool decay_per_value_head = false;    // channel decay: of every value head (HV K channels; kda's checkpoints), else of every key head
  std::string decay_gate = "softplus";  // channel decay: softplus -exp(a) softplus(x + delta) | logsigmoid log(sigmoid(x + bias)) / 16 (gla's layer)
  std::string feature_map = "none";     // of q and k, before the recurrence: none | elu (elu(x) + 1) | relu | product (of two learned affine maps of a head)
  double rope_theta = 0;                // > 0: rotary position embedding of q and k with this base (retnet: 10000); head_dim even
  // Comba as its published layer computes it: D p is taken from q before both are normalised, where p = sigmoid(decay) k is the
  // erase key (rule with erase_key=own; else p = k). The rule's read=corrected takes d k from the normalised q.
  bool raw_read_correction = false;
  // Ablations of the papers that are not axes of the rule (docs/rules/ablations.md).
  std::string gain_source = "projection";  // projection | learned: the gain gate is one learned number a layer
  std::string gain_factor = "none";        // none | 1/t | 1/sqrt(t) | 1/log(t+1): what the gain gate is multiplied by at token t = 1, 2, ...
  bool single_gate = false;                // scalar decay: 1 - gain gate, without a projection of its own
  std::string precond_gates = "own";       // own | tied: the preconditioner's decay and gain are the main ones (scalar decay or none)
  std::string init = "xavier";             // xavier | normal
  double precond_x = 1.5;
  std::string peer;  // of a model that came from another program (peer.h): its config.json and what else an export needs; JSON, or ""

  Rule resolved_rule() const;  // with gain_bound and precond_x from above, validated
  int64_t v_heads() const { return num_v_heads > 0 ? num_v_heads : num_heads; }
  int64_t head_v_dim() const;
  int64_t mlp_size() const;
  GateKind gate_kind() const;
  InitScheme init_scheme() const;
  RecurrentMixerSpec mixer_spec() const;  // of the layers with a recurrence; the config must be valid
  MixerSpec layer_spec(int64_t layer) const;

  bool operator==(const ModelConfig&) const = default;
};

// Throws Error(kUsage) naming the key, what was expected and what came. A valid config has at most 2^33 parameters and
// 2^31 values in one tensor, so that a hostile file cannot ask for terabytes.
void validate(const ModelConfig& config);
// Number of parameters, without allocating any; sizes must be in the ranges that validate() accepts.
double parameter_count(const ModelConfig& config);
// Unknown keys are an error with the nearest known name. `where` names the file in messages. The result is validated.
ModelConfig config_from_json(const nlohmann::json& json, const std::string& where);
nlohmann::json config_to_json(const ModelConfig& config);

}  // namespace fw
