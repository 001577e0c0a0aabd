// Adapters of a model (nn/lora.h): which projections can have one, and folders of adapters in PEFT's format. Such a
// folder has adapter_config.json and adapter_model.safetensors, with these tensors in float32:
// - base_model.model.MODULE.lora_A.weight [rank, in],
// - base_model.model.MODULE.lora_B.weight [out, rank].
// MODULE is the name of the projection's tensor in the base model's folder, without .weight. PEFT wraps the module of
// experts once for each of its parameters that has adapters: MODULE is its name, or of the inner of two wrappers,
// gate_up_proj's, that with .base_layer. Their tensors are [E rank, in] and [out, rank E].
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/config.h"
#include "nn/lora.h"

namespace fw {

template <class T>
class LanguageModel;

struct AdapterConfig {
  LoraConfig lora;
  std::string base;       // folder of the base model, base_model_name_or_path
  bool hf_names = false;  // projections are called as in the Hugging Face folder that the model came from
  std::vector<std::string> parameters = {};  // of experts, as PEFT's target_parameters names them
};

// All projections of mixers and MLPs, in order.
std::vector<LoraTarget> lora_targets(const ModelConfig& config, const std::vector<ParamSpec>& specs, bool hf_names);
// Those of which a name ends with one of `modules`, all for an empty list; experts have PEFT's module names. Throws
// Error(kUsage) for one that ends none.
std::vector<LoraTarget> chosen_targets(std::vector<LoraTarget> targets, const std::vector<std::string>& modules);

bool is_adapter_folder(const std::string& folder);  // by its adapter_config.json
// Throws Error(kUsage) for adapters of another kind than LoRA's, and for values of it that mean nothing: r below 1,
// lora_alpha 0.
AdapterConfig read_adapter_config(const std::string& folder);
// The tokenizer that save_adapters() noted; 0 in folders of other programs.
uint64_t adapter_tokenizer(const std::string& folder);

// Adds the adapters of a folder to a model without any. Throws Error(kUsage) naming the tensor, what was expected and
// what came, for those of a model of other sizes.
template <class T>
void load_adapters(const std::string& folder, LanguageModel<T>& model);
template <class T>
void save_adapters(const std::string& folder, const LanguageModel<T>& model);
// The adapters where the model has some, else the model.
template <class T>
void save_trained(const std::string& folder, const LanguageModel<T>& model);
// The tensor of a parameter of the adapters in adapter_model.safetensors.
std::string adapter_tensor(const ParamSpec& spec);

// The rows of B in a file, where those of one tensor of another program are several parameters here whose rows lie
// between each other's (a query beside its gate). B of experts has a column for each rank and expert in a file.
class AdapterRows {
 public:
  template <class T>
  explicit AdapterRows(const LanguageModel<T>& model);
  // values: of a parameter of the adapters, in the order of the model or, not to_file, of a file; into the other one.
  template <class T>
  void reorder(const ParamSpec& spec, std::vector<T>& values, bool to_file) const;
  std::vector<int64_t> file_shape(const ParamSpec& spec) const;

 private:
  std::map<std::string, int64_t> experts_;            // by the parameter's name
  std::map<std::string, std::vector<int64_t>> rows_;  // by the parameter's name
};

// The adapters' products become part of the weights, and the model has no adapters. A weight that came in bf16 is
// rounded to it.
template <class T>
void merge_adapters(LanguageModel<T>& model);

}  // namespace fw
