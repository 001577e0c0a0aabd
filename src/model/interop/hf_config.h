// Models of flash-linear-attention and hybrids of transformers: config.json as ours and back, and the names that
// their files give our parameters. Of state-spaces/mamba's own models, whose config.json has d_model in place of a
// model_type, those of Mamba-3: they are one more type, called mamba_ssm.
//
// A configuration that came from another program keeps that program's own text in ModelConfig::hf:
//     {"config": {its config.json, every key of it},
//      "tensors": {name: {"dtype": "BF16", "shape": [1, 1, 4, 1]}, ...}, "end_tokens": [256, 257],
//      "other_names": {our name: a tensor's name, where HfNames::other_tensor() says it},
//      "single_experts": [our names of parameters that were a tensor for each expert's matrix]}
// "end_tokens" has the ids of generation_config.json that end a text, if there were some. "tensors" has those that were
// not float32 of our shape (model_folder.cpp fills and reads it). That makes an export after an import give the same
// configuration and the same tensors. A model of our own is exported by looking for an FLA type whose configuration
// says the same.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/interop/hf_tensor.h"

namespace fw {

namespace hf {
struct Type;
}

// Whether config.json is a Hugging Face one: it has a model_type that is not "fastweight", or none and a d_model.
bool is_hf_config(const nlohmann::json& config);
// What a Hugging Face model has that this program does not, such as "mamba2"; "" when it can be read.
std::string unknown_hf_model(const nlohmann::json& config);

// Throws Error(kUsage) naming file (`where`), key, what was expected and what came, for:
// - an unknown model,
// - a key whose value asks for something that the layer here does not compute,
// - an unknown key with a number or a switch.
//
// Keys that are known to change no number (kernels, caches, token ids) are not looked at. `warnings` gets the other
// keys that are not known. The result is validated and has `hf` set.
ModelConfig config_from_hf(const nlohmann::json& config, const std::string& where, StringList* warnings = nullptr);
// The Hugging Face configuration of the same model: the one it came with, or one made for it. Throws Error(kUsage)
// saying which keys stand in the way when no FLA type has such a layer.
nlohmann::json config_to_hf(const ModelConfig& config);

// A configuration like `wanted` whose model can be exported, for use before it is trained: the FLA type with the
// same rule says what the other keys have to be. Throws Error(kUsage) when no type has the rule (with the nearest and
// what it wants), and when a key of `fixed`, which the user has said, would have to change.
struct HfLayout {
  std::string type;  // "gdn2"
  ModelConfig config;
  std::vector<std::string> changes;  // "decay_rank = 64 (else 0)"
};
HfLayout hf_layout(const ModelConfig& wanted, const std::vector<std::string>& fixed);

// What a Hugging Face folder calls our parameters; `hf_config` as config_to_hf() gives it, or as it was read.
class HfNames {
 public:
  explicit HfNames(const nlohmann::json& hf_config);
  HfTensor tensor(const ParamSpec& spec) const;
  // Where other folders of the type have it; its name is "" where there is no other place.
  HfTensor other_tensor(const ParamSpec& spec) const;
  // The tensor that a head has beside the embedding that it is, in files that have one; or "".
  std::string tied_head() const;
  // Whether a tensor of the folder is no part of the text model (a vision tower, layers that predict further tokens).
  bool is_aside(const std::string& tensor) const;

 private:
  std::string renamed(const std::string& name) const;

  const hf::Type* type_;
  ModelConfig config_;  // of types that lay their layers out in their own way
  bool use_output_gate_ = true, tied_ = true;
};

}  // namespace fw
