// Models of flash-linear-attention (the peer): its config.json as ours and back, and the names its files give our
// parameters. Of state-spaces/mamba's own models, whose config.json has d_model in place of a model_type, those of
// Mamba-3: they are one more type, called mamba_ssm.
//
// A configuration that came from a peer keeps the peer's own text in ModelConfig::peer:
//     {"config": {the peer's config.json, every key of it},
//      "tensors": {name: {"dtype": "BF16", "shape": [1, 1, 4, 1]}, ...}, "end_tokens": [256, 257]}
// "end_tokens" has the ids of generation_config.json that end a text, if there were some. "tensors" has those that were
// not float32 of our shape (model_folder.cpp fills and reads it). That makes an export after an import give the same
// configuration and the same tensors. A model of our own is exported by looking for a peer's type whose configuration
// says the same.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/config.h"

namespace fw {

// Whether config.json is a peer's: it has a model_type that is not "fastweight", or none and a d_model.
bool is_peer_config(const nlohmann::json& config);
// What a peer's model has that this program does not, such as "mamba2"; "" when it can be read.
std::string unknown_peer_model(const nlohmann::json& config);

// Throws Error(kUsage) naming file (`where`), key, what was expected and what came, for:
// - an unknown model,
// - a key whose value asks for something that the layer here does not compute,
// - an unknown key with a number or a switch.
//
// Keys that are known to change no number (kernels, caches, token ids) are not looked at. `warnings` gets the other
// keys that are not known. The result is validated and has `peer` set.
ModelConfig config_from_peer(const nlohmann::json& config, const std::string& where, StringList* warnings = nullptr);
// The peer's configuration of the same model: the one it came with, or one made for it. Throws Error(kUsage) saying
// which keys stand in the way when no peer's type has such a layer.
nlohmann::json config_to_peer(const ModelConfig& config);

// A configuration like `wanted` whose model can be exported, for use before it is trained: the peer's type with the
// same rule says what the other keys have to be. Throws Error(kUsage) when no type has the rule (with the nearest and
// what it wants), and when a key of `fixed`, which the user has said, would have to change.
struct PeerLayout {
  std::string type;  // "gdn2"
  ModelConfig config;
  std::vector<std::string> changes;  // "decay_rank = 64 (else 0)"
};
PeerLayout peer_layout(const ModelConfig& wanted, const std::vector<std::string>& fixed);

// The peer's name of our parameter; peer_config as config_to_peer gives it.
std::string peer_parameter_name(const nlohmann::json& peer_config, const std::string& name);

// Where a peer's file has a parameter: a tensor of its own, or some rows of one that several share.
struct PeerTensor {
  std::string name;
  int64_t first = 0;  // row
  int64_t rows = 0;   // of the tensor; 0: it is the parameter's alone
};
PeerTensor peer_tensor(const nlohmann::json& peer_config, const ParamSpec& spec);
// The tensor that a head has beside the embedding that it is, in files that have one; or "".
std::string peer_tied_head(const nlohmann::json& peer_config);

}  // namespace fw
