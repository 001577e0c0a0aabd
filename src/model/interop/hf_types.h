// The types of models of flash-linear-attention and of transformers (interop/hf_config.h): how each one's configuration
// reads as ours and ours as its, and what its parameters are called. A new type is a reader, a writer and a line of the
// table in hf_types.cpp; one whose files lay a layer out in another way has a function for the names too.
#pragma once

#include <array>
#include <span>
#include <string>

#include "model/config.h"
#include "model/interop/hf_keys.h"
#include "model/interop/hf_tensor.h"

namespace fw::hf {

// Another name that an FLA type has for one of our parameters; both are parts of a name between dots.
struct Rename {
  const char* ours;
  const char* theirs;
};

// One type of model: its configuration as ours, ours as its, and what its parameters are called.
struct Type {
  const char* name;  // model_type, or that of the mixer (gdn2)
  void (*read)(const Keys&, ModelConfig&);
  void (*write)(const ModelConfig&, Json&);  // null: a model of our own is not exported as this type
  std::array<Rename, 2> renames = {};
  // Of the state-space models, which have "backbone" for our "model", "mixer" for "attn": what they call the norm
  // before the mixer.
  const char* norm = nullptr;
  // of RWKV-7: what they call "mlp"; the norm after the embedding is then the first layer's "pre_norm"
  const char* mlp = nullptr;
  // of state-spaces/mamba: no model_type, an MLP of two tensors, a tied head beside the embedding
  bool mamba_ssm = false;
  // Of transformers' hybrids: the configuration lists its layers itself, and this says where a parameter lies. It takes
  // the configuration as ours.
  HfTensor (*tensor)(const ModelConfig&, const ParamSpec&) = nullptr;
  // What their tensors have in place of "model." outside the head.
  const char* prefix = "model.";
  // How names of tensors begin that are no part of the text model: those are left aside.
  std::array<const char*, 2> aside = {};
};

// All of them. The first that says the same as a model of our own is what it is exported as.
std::span<const Type> types();

// A hybrid: the layers that `attn` names, an object or a list of them, have attention in the mixer's place; the others
// are `base`.
void read_hybrid(const Keys& keys, ModelConfig& c, const char* base = "recurrent");
void write_hybrid(const ModelConfig& c, Json& json);

// The length of the shortest beginning that repeated to the length gives the whole list.
size_t period(const StringList& list);

}  // namespace fw::hf
