// Model folders: config.json + model.safetensors, as other programs of the family lay them out.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/nearest.h"
#include "base/safetensors.h"
#include "model/language_model.h"

namespace fw {
namespace {

constexpr size_t kMaxConfigBytes = size_t{1} << 20;

ModelConfig read_config(const std::string& path) {
  const std::string text = read_file(path, kMaxConfigBytes);
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': expected a JSON object with the model's configuration: {}", path, error.what());
  }
  return config_from_json(json, "'" + path + "'");
}

}  // namespace

template <class T>
void save_model(const std::string& folder, const LanguageModel<T>& model) {
  make_folders(folder);
  SafetensorsWriter writer;
  writer.set_metadata("format", "pt");  // what loaders of the Hugging Face family look for
  const Params<T>& params = model.params();
  std::vector<float> converted;
  std::span<const float> values;
  if constexpr (std::is_same_v<T, float>) {
    values = params.values();
  } else {
    converted.resize(static_cast<size_t>(params.size()));
    std::transform(params.values().begin(), params.values().end(), converted.begin(), [](T x) { return static_cast<float>(x); });
    values = converted;
  }
  for (const ParamSpec& spec : params.specs()) {
    writer.add<float>(spec.name, spec.shape, values.subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())));
  }
  writer.write(folder + "/model.safetensors");
  write_file_atomic(folder + "/config.json", config_to_json(model.config()).dump(2) + "\n");
}

template <class T>
LanguageModel<T> load_model(const std::string& folder) {
  const ModelConfig config = read_config(folder + "/config.json");
  const std::string path = folder + "/model.safetensors";
  const SafetensorsReader reader(path);
  double found = 0;
  for (const auto& [name, info] : reader.tensors()) found += static_cast<double>(info.count());
  // Before memory is taken: a configuration that has little to do with the file beside it.
  const double expected = parameter_count(config);
  if (expected > 2 * found + 1e6) fail_usage("'{}': expected {:.0f} values for the configuration beside it, got {:.0f}", path, expected, found);

  LanguageModel<T> model(config);
  Params<T>& params = model.params();
  std::vector<std::string> names;
  for (const ParamSpec& spec : params.specs()) names.push_back(spec.name);
  const std::unordered_set<std::string> known(names.begin(), names.end());
  for (const auto& [name, info] : reader.tensors()) {
    if (known.count(name) != 0) continue;
    const std::string near = nearest(name, names);
    fail_usage("'{}': unexpected tensor '{}': the configuration beside it has no such parameter{}", path, name,
               near.empty() ? "" : fmt::format(" (nearest: '{}')", near));
  }
  for (const ParamSpec& spec : params.specs()) {
    reader.read<T>(spec.name, spec.shape, params.values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())));
  }
  return model;
}

template void save_model<float>(const std::string&, const LanguageModel<float>&);
template void save_model<double>(const std::string&, const LanguageModel<double>&);
template LanguageModel<float> load_model<float>(const std::string&);
template LanguageModel<double> load_model<double>(const std::string&);

}  // namespace fw
