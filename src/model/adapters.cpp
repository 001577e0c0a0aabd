#include "model/adapters.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <type_traits>

#include "base/bf16.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/keys.h"
#include "base/nearest.h"
#include "base/printable.h"
#include "base/safetensors.h"
#include "model/interop/hf_config.h"
#include "model/interop/hf_tensor.h"
#include "model/language_model.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr const char* kAdapterConfig = "/adapter_config.json";
constexpr const char* kAdapterTensors = "/adapter_model.safetensors";
constexpr const char* kAdapterTokenizer = "fastweight_tokenizer";
constexpr const char* kAdapterPrefix = "base_model.model.";
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kLayerPrefix = "model.layers.";
// PEFT wraps the module of experts for each of its parameters, for this one first.
constexpr const char *kInnerParameter = "gate_up_proj", *kInnerModule = ".base_layer";

// Of parameters that linear operations multiply with. Routers have no adapters, as in PEFT.
bool is_projection(const ParamSpec& spec) {
  if (!spec.operand() || !spec.name.starts_with(kLayerPrefix)) return false;
  return spec.stacked || (spec.name.ends_with(kWeight) && !spec.name.ends_with(".gate.weight"));
}

std::string without_weight(const std::string& name) {
  return name.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : name;
}

// The module that a parameter belongs to, and the parameter's own name.
std::pair<std::string, std::string> split_name(const std::string& parameter) {
  const size_t at = parameter.rfind('.');
  return {parameter.substr(0, at), parameter.substr(at + 1)};
}

// Of experts' targets the names that PEFT gives the adapters.
void name_wrappers(std::vector<LoraTarget>& targets) {
  std::map<std::string, int> adapted;  // parameters of a module
  for (const LoraTarget& target : targets) adapted[split_name(target.module).first] += target.experts > 0 ? 1 : 0;
  for (LoraTarget& target : targets) {
    if (target.experts == 0) continue;
    const auto [module, parameter] = split_name(target.module);
    target.module = module + (adapted[module] > 1 && parameter == kInnerParameter ? kInnerModule : "");
  }
}

// q_proj; of numbered modules f_proj.0.
std::string short_name(const std::string& module) {
  size_t at = module.rfind('.');
  while (at != std::string::npos && std::isdigit(static_cast<unsigned char>(module[at + 1])) != 0)
    at = module.rfind('.', at - 1);
  return module.substr(at == std::string::npos ? 0 : at + 1);
}

// Whether PEFT takes a module's name in target_modules for that of experts' parameters, whatever stands before it: of
// qwen3_next the projections of MLPs, also of shared experts. Their weights are target_parameters instead.
bool is_experts_to_peft(const AdapterConfig& config, const std::string& hf, const std::string& module) {
  if (!config.hf_names || hf.empty()) return false;
  if (Json::parse(hf).value(Json::json_pointer("/config/model_type"), "") != "qwen3_next") return false;
  const std::string name = short_name(module);
  return name == "gate_proj" || name == "up_proj" || name == "down_proj";
}

bool ends_with_module(const LoraTarget& target, const std::string& end) {
  return std::any_of(target.names.begin(), target.names.end(),
                     [&](const std::string& name) { return name == end || name.ends_with("." + end); });
}

Json parsed_config(const std::string& path) {
  Json json = parse_json(read_file(path, size_t{1} << 24), "'" + path + "'");
  if (!json.is_object()) fail_usage("'{}': expected an object, got {}", path, shown(json));
  return json;
}

// A key of adapter_config.json whose other values ask for what this program does not compute.
void expect_absent(const std::string& path, const Json& json, const char* key) {
  const auto it = json.find(key);
  if (it == json.end() || it->is_null() || *it == false || *it == "none" || it->empty()) return;
  fail_usage("'{}': {}: expected none, got {}: this program computes LoRA without it", path, key, shown(*it));
}

double positive(const std::string& path, const Json& json, const char* key) {
  const auto it = json.find(key);
  const double value = it != json.end() && it->is_number() ? it->get<double>() : 0;
  if (!(value > 0) || !std::isfinite(value)) {
    fail_usage("'{}': {}: expected a number > 0, got {}", path, key, it == json.end() ? "no such key" : shown(*it));
  }
  return value;
}

}  // namespace

std::vector<LoraTarget> lora_targets(const ModelConfig& config, const std::vector<ParamSpec>& specs, bool hf_names) {
  const bool has_hf = !config.hf.empty();
  if (hf_names && !has_hf) fail_internal("lora_targets: expected a model of another program");
  std::optional<HfNames> hf;
  if (has_hf) hf.emplace(config_to_hf(config));
  std::vector<LoraTarget> targets;
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParamSpec& spec = specs[i];
    if (!is_projection(spec)) continue;
    HfTensor own;
    own.name = spec.name;
    const HfTensor theirs = has_hf ? hf->tensor(spec) : own, &tensor = hf_names ? theirs : own;
    const auto [at, is_new] = by_name.try_emplace(tensor.name, targets.size());
    if (is_new) {
      LoraTarget& target = targets.emplace_back();
      target.module = without_weight(tensor.name);
      target.in = spec.shape.back();
      target.out = spec.stacked ? spec.shape[1] : tensor.rows > 0 ? tensor.rows : spec.shape[0];
      target.experts = spec.stacked ? spec.shape[0] : 0;
    }
    LoraTarget& target = targets[at->second];
    for (const std::string& name : {spec.name, theirs.name}) target.names.push_back(without_weight(name));
    if (spec.stacked) {
      target.parts.push_back({static_cast<int>(i), 0});
      continue;
    }
    target.parts.push_back({static_cast<int>(i), static_cast<int64_t>(target.file_rows.size())});
    for (int64_t row = 0; row < spec.shape[0]; ++row) target.file_rows.push_back(tensor.row(row));
  }
  for (LoraTarget& target : targets) {
    if (target.experts > 0) continue;
    if (static_cast<int64_t>(target.file_rows.size()) != target.out)
      fail_internal("lora_targets: '{}': expected parameters of all {} rows", target.module, target.out);
    if (std::is_sorted(target.file_rows.begin(), target.file_rows.end())) target.file_rows.clear();
  }
  return targets;
}

std::vector<LoraTarget> chosen_targets(std::vector<LoraTarget> targets, const std::vector<std::string>& modules) {
  for (const std::string& end : modules) {
    if (std::any_of(targets.begin(), targets.end(), [&](const LoraTarget& t) { return ends_with_module(t, end); }))
      continue;
    std::set<std::string> names;
    for (const LoraTarget& target : targets) names.insert(short_name(target.module));
    fail_usage("lora_modules: '{}': expected the name of a projection of the model's mixers or MLPs, or its end: {}",
               excerpt(end), fmt::join(names, ", "));
  }
  std::erase_if(targets, [&](const LoraTarget& target) {
    return !modules.empty() && std::none_of(modules.begin(), modules.end(),
                                            [&](const std::string& end) { return ends_with_module(target, end); });
  });
  name_wrappers(targets);
  return targets;
}

bool is_adapter_folder(const std::string& folder) { return file_exists(folder + kAdapterConfig); }

AdapterConfig read_adapter_config(const std::string& folder) {
  const std::string path = folder + kAdapterConfig;
  const Json json = parsed_config(path);
  const Json type = json.value("peft_type", Json("LORA"));
  if (type != "LORA") fail_usage("'{}': peft_type: expected LORA, got {}", path, shown(type));
  for (const char* key :
       {"bias", "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out", "layer_replication",
        "trainable_token_indices", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"})
    expect_absent(path, json, key);
  AdapterConfig config;
  const double rank = positive(path, json, "r");
  if (rank != std::floor(rank) || rank > 65536) fail_usage("'{}': r: expected 1 to 65536, got {}", path, rank);
  config.lora.rank = static_cast<int64_t>(rank);
  config.lora.alpha = positive(path, json, "lora_alpha");
  config.lora.rank_stabilized = json.value("use_rslora", Json()) == true;
  const Json base = json.value("base_model_name_or_path", Json());
  if (base.is_string()) config.base = base.get<std::string>();
  const Json parameters = json.value("target_parameters", Json());
  if (!parameters.is_null() && !parameters.is_array())
    fail_usage("'{}': target_parameters: expected a list of names, got {}", path, shown(parameters));
  for (const Json& one : parameters) {
    if (!one.is_string())
      fail_usage("'{}': target_parameters: expected a list of names, got {}", path, shown(parameters));
    config.parameters.push_back(one.get<std::string>());
  }
  return config;
}

uint64_t adapter_tokenizer(const std::string& folder) {
  const SafetensorsReader reader(folder + kAdapterTensors);
  const auto it = reader.metadata().find(kAdapterTokenizer);
  return it == reader.metadata().end() ? 0 : std::strtoull(it->second.c_str(), nullptr, 16);
}

std::string adapter_tensor(const ParamSpec& spec) { return kAdapterPrefix + spec.name; }

template <class T>
AdapterRows::AdapterRows(const LanguageModel<T>& model) {
  for (const LoraTarget& target : model.adapter_targets()) {
    const std::string name = target.module + ".lora_B.weight";
    if (!target.file_rows.empty()) rows_.emplace(name, target.file_rows);
    if (target.experts > 0) experts_.emplace(name, target.experts);
  }
}

std::vector<int64_t> AdapterRows::file_shape(const ParamSpec& spec) const {
  const auto found = experts_.find(spec.name);
  if (found == experts_.end()) return spec.shape;
  return {spec.shape[0] / found->second, spec.shape[1] * found->second};
}

template <class T>
void AdapterRows::reorder(const ParamSpec& spec, std::vector<T>& values, bool to_file) const {
  if (const auto stacked = experts_.find(spec.name); stacked != experts_.end()) {
    const std::vector<T> from = values;
    const int64_t experts = stacked->second, out = spec.shape[0] / experts, width = spec.shape[1];
    for (int64_t i = 0; i < spec.size(); ++i) {
      const int64_t expert = i / (out * width), row = i / width % out, r = i % width;
      const auto ours = static_cast<size_t>(i), theirs = static_cast<size_t>((row * width + r) * experts + expert);
      values[to_file ? theirs : ours] = from[to_file ? ours : theirs];
    }
    return;
  }
  const auto found = rows_.find(spec.name);
  if (found == rows_.end()) return;
  const std::vector<T> from = values;
  const auto rank = static_cast<size_t>(spec.shape[1]);
  for (size_t row = 0; row < found->second.size(); ++row) {
    const auto in_file = static_cast<size_t>(found->second[row]);
    std::copy_n(from.begin() + static_cast<int64_t>((to_file ? row : in_file) * rank), rank,
                values.begin() + static_cast<int64_t>((to_file ? in_file : row) * rank));
  }
}

template <class T>
void load_adapters(const std::string& folder, LanguageModel<T>& model) {
  AdapterConfig config = read_adapter_config(folder);
  const std::string path = folder + kAdapterTensors;
  const SafetensorsReader reader(path);
  // The targets' names by the modules that a file has.
  const auto modules_of = [&](bool hf_names) {
    std::map<std::string, std::string> names;
    for (const LoraTarget& target : lora_targets(model.config(), model.params().specs(), hf_names)) {
      if (target.experts == 0) {
        names[target.module] = target.module;
        continue;
      }
      const auto [module, parameter] = split_name(target.module);
      const bool is_inner = parameter == kInnerParameter;
      if (reader.has(fmt::format("{}{}{}.lora_A.weight", kAdapterPrefix, module, kInnerModule))) {
        names[module + (is_inner ? kInnerModule : "")] = target.module;
      } else if (std::any_of(config.parameters.begin(), config.parameters.end(),
                             [&](const std::string& end) { return ends_with_module(target, end); })) {
        names[module] = target.module;
      }
    }
    return names;
  };
  const auto module_of = [](const std::string& tensor) -> std::string {
    if (!tensor.starts_with(kAdapterPrefix)) return "";
    const size_t end = std::min(tensor.rfind(".lora_A.weight"), tensor.rfind(".lora_B.weight"));
    const size_t begin = std::string_view(kAdapterPrefix).size();
    return end == std::string::npos || end < begin ? "" : tensor.substr(begin, end - begin);
  };
  if (reader.tensors().empty()) fail_usage("'{}': expected adapters, got no tensor", path);
  std::map<std::string, std::string> known = modules_of(false);
  const auto unknown_in = [&](const std::map<std::string, std::string>& names) {
    return std::count_if(reader.tensors().begin(), reader.tensors().end(),
                         [&](const auto& tensor) { return names.count(module_of(tensor.first)) == 0; });
  };
  if (!model.config().hf.empty()) {
    std::map<std::string, std::string> of_hf = modules_of(true);
    config.hf_names = unknown_in(of_hf) < unknown_in(known);
    if (config.hf_names) known = std::move(of_hf);
  }
  std::set<std::string> modules;
  for (const auto& [name, info] : reader.tensors()) {
    const auto found = known.find(module_of(name));
    if (found == known.end()) {
      std::vector<std::string> all;
      all.reserve(known.size());
      for (const auto& [module, target] : known) all.push_back(module);
      const std::string near = nearest(module_of(name), all);
      fail_usage(
          "'{}': unexpected tensor '{}': expected {}MODULE.lora_A.weight and lora_B.weight of the base model's "
          "projections{}",
          path, excerpt(name), kAdapterPrefix, near.empty() ? "" : fmt::format(" (nearest: '{}')", near));
    }
    modules.insert(found->second);
  }
  config.lora.modules = {modules.begin(), modules.end()};
  model.add_adapters(config);
  const AdapterRows rows(model);
  std::vector<T> values;
  for (const ParamSpec& spec : model.trained().specs()) {
    values.resize(static_cast<size_t>(spec.size()));
    reader.read<T>(adapter_tensor(spec), rows.file_shape(spec), values);
    if (!std::all_of(values.begin(), values.end(), [](T x) { return std::isfinite(x); }))
      fail_numeric("'{}': tensor '{}' is not finite: the file is damaged, or the run diverged", path,
                   adapter_tensor(spec));
    rows.reorder(spec, values, false);
    model.trained().write_values(spec, values);
  }
}

template <class T>
void save_adapters(const std::string& folder, const LanguageModel<T>& model) {
  const AdapterConfig& config = *model.adapters();
  make_folders(folder);
  SafetensorsWriter writer;
  writer.set_metadata("format", "pt");
  if (model.tokenizer() != 0) writer.set_metadata(kAdapterTokenizer, fmt::format("{:016x}", model.tokenizer()));
  std::set<std::string> ends, parameters;  // of modules, and of experts' parameters
  for (const LoraTarget& target : model.adapter_targets()) {
    if (target.experts > 0) {
      const auto [module, parameter] = split_name(target.names.back());
      parameters.insert(short_name(module) + "." + parameter);
    } else if (is_experts_to_peft(config, model.config().hf, target.module)) {
      const auto [parent, projection] = split_name(target.module);
      parameters.insert(fmt::format("{}.{}{}", short_name(parent), projection, kWeight));
    } else if (config.lora.modules.empty()) {
      ends.insert(short_name(target.module));
    } else {
      std::copy_if(config.lora.modules.begin(), config.lora.modules.end(), std::inserter(ends, ends.end()),
                   [&](const std::string& end) { return ends_with_module(target, end); });
    }
  }
  const AdapterRows rows(model);
  for (const ParamSpec& spec : model.trained().specs()) {
    const HostView<T> view = model.trained().host_values(spec);
    std::vector<float> values(view.span().begin(), view.span().end());
    rows.reorder(spec, values, true);
    writer.add_copy<float>(adapter_tensor(spec), rows.file_shape(spec), values);
  }
  writer.write(folder + kAdapterTensors);
  Json json = {{"peft_type", "LORA"},
               {"task_type", "CAUSAL_LM"},
               {"base_model_name_or_path", config.base},
               {"r", config.lora.rank},
               {"lora_alpha", config.lora.alpha},
               {"use_rslora", config.lora.rank_stabilized},
               {"target_modules", ends},
               {"lora_dropout", 0.0},
               {"bias", "none"},
               {"fan_in_fan_out", false},
               {"inference_mode", true},
               {"init_lora_weights", true}};
  if (!parameters.empty()) json["target_parameters"] = parameters;
  if (ends.empty()) json["target_modules"] = nullptr;
  write_file_atomic(folder + kAdapterConfig, json.dump(2) + "\n");
}

template <class T>
void save_trained(const std::string& folder, const LanguageModel<T>& model) {
  model.adapters() == nullptr ? save_model(folder, model) : save_adapters(folder, model);
}

template <class T>
void merge_adapters(LanguageModel<T>& model) {
  if (model.adapters() == nullptr) fail_internal("merge_adapters: expected a model with adapters");
  const bool has_hf = !model.config().hf.empty();
  std::optional<HfNames> hf;
  if (has_hf) hf.emplace(config_to_hf(model.config()));
  const Json peer = has_hf ? Json::parse(model.config().hf) : Json::object();
  const Json tensors = peer.value("tensors", Json::object()), other_names = peer.value("other_names", Json::object());
  std::vector<LoraTarget> targets = model.merge_adapters();
  if constexpr (std::is_same_v<T, float>) {
    for (const LoraTarget& target : targets) {
      for (const LoraTarget::Part& part : target.parts) {
        const ParamSpec& spec = model.params().specs()[static_cast<size_t>(part.parameter)];
        const std::string name = other_names.value(spec.name, has_hf ? hf->tensor(spec).name : spec.name);
        const std::string file_name =
            spec.stacked && !tensors.contains(name) ? single_experts(name, spec).front().name : name;
        if (tensors.value(file_name, Json::object()).value("dtype", "F32") != "BF16") continue;
        const HostView<float> view = model.params().host_values(spec);
        std::vector<Bf16> rounded(view.span().size());
        std::vector<float> values(rounded.size());
        round_to_bf16(spec.size(), view.span().data(), rounded.data());
        widen_bf16(spec.size(), rounded.data(), values.data());
        model.params().write_values(spec, values);
      }
    }
  }
}

#define FW_INSTANTIATE(T)                                                      \
  template AdapterRows::AdapterRows(const LanguageModel<T>&);                  \
  template void load_adapters<T>(const std::string&, LanguageModel<T>&);       \
  template void save_adapters<T>(const std::string&, const LanguageModel<T>&); \
  template void save_trained<T>(const std::string&, const LanguageModel<T>&);  \
  template void merge_adapters<T>(LanguageModel<T>&);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE
template void AdapterRows::reorder<float>(const ParamSpec&, std::vector<float>&, bool) const;
template void AdapterRows::reorder<double>(const ParamSpec&, std::vector<double>&, bool) const;

}  // namespace fw
