#include "model/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/printable.h"

namespace fw {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kFile = "/model.safetensors";
constexpr const char* kIndex = "/model.safetensors.index.json";
constexpr size_t kMostIndex = size_t{64} << 20;
constexpr size_t kNamed = 3;  // in a message
constexpr const char* kSafetensors = ".safetensors";

// Tensor -> file, checked: every file is one of this folder.
std::map<std::string, std::string> weight_map(const std::string& index) {
  const std::string where = "'" + index + "'";
  const Json json = parse_json(read_file(index, kMostIndex), where);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object() || map->empty())
    fail_usage("{}: weight_map: expected an object of tensors and their files", where);
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string())
      fail_usage("{}: weight_map: {}: expected the name of a file, got {}", where, excerpt(tensor),
                 excerpt(file.dump()));
    const std::string name = file.get<std::string>();
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos || !name.ends_with(kSafetensors) ||
        name == kSafetensors) {
      fail_usage("{}: weight_map: {}: expected the name of a .safetensors file of this folder, got '{}'", where,
                 excerpt(tensor), excerpt(name));
    }
    files[tensor] = name;
  }
  return files;
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamed; ++i)
    text += fmt::format("{}'{}'", i > 0 ? ", " : "", excerpt(names[i]));
  return names.size() > kNamed ? text + ", ..." : text;
}

// Names in the folder that end so, in order.
std::vector<std::string> files_like(const std::string& folder, std::initializer_list<const char*> endings) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (std::any_of(endings.begin(), endings.end(), [&](const char* ending) { return name.ends_with(ending); }))
      names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

[[noreturn]] void fail_without_tensors(const std::string& folder) {
  if (const std::vector<std::string> shards = files_like(folder, {kSafetensors}); !shards.empty()) {
    fail_usage(
        "'{}': expected model.safetensors, or shards with their model.safetensors.index.json, got {} without one: "
        "fetch the index too",
        folder, list(shards));
  }
  if (const std::vector<std::string> others =
          files_like(folder, {".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"});
      !others.empty()) {
    fail_usage(
        "'{}': expected model.safetensors, got {}: this program reads safetensors alone. Save the model again with the "
        "program that it is of "
        "(AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) of transformers writes safetensors)",
        folder, list(others));
  }
  fail_usage("'{}': expected model.safetensors, or model.safetensors.index.json with its shards, got neither", folder);
}

}  // namespace

ModelFiles::ModelFiles(const std::string& folder) : name_(folder + kFile) {
  if (file_exists(name_)) {
    files_.emplace_back(name_);
    tensors_ = files_.front().tensors();
    return;
  }
  name_ = folder + kIndex;
  if (!file_exists(name_)) fail_without_tensors(folder);
  const std::map<std::string, std::string> map = weight_map(name_);
  std::set<std::string> shards;
  for (const auto& [tensor, file] : map) shards.insert(file);
  std::vector<std::string> missing;
  std::copy_if(shards.begin(), shards.end(), std::back_inserter(missing),
               [&](const std::string& file) { return !file_exists(folder + "/" + file); });
  if (!missing.empty()) {
    fail_usage("'{}': {} of {} shards that it names are not in the folder: {}: fetch them too", name_, missing.size(),
               shards.size(), list(missing));
  }
  for (const std::string& file : shards) {
    const SafetensorsReader& reader = files_.emplace_back(fmt::format("{}/{}", folder, file));
    for (const auto& [tensor, info] : reader.tensors()) {
      const auto entry = map.find(tensor);
      if (entry != map.end() && entry->second != file) {
        fail_usage("'{}': tensor '{}': expected it in '{}' alone, got it in '{}' too", name_, excerpt(tensor),
                   excerpt(entry->second), excerpt(file));
      }
      if (!tensors_.emplace(tensor, info).second)
        fail_usage("'{}': tensor '{}': expected it in one shard, got it in several", name_, excerpt(tensor));
      file_of_[tensor] = &reader;
    }
  }
  for (const auto& [tensor, file] : map) {
    if (!has(tensor))
      fail_usage("'{}': tensor '{}': expected it in '{}', which does not have it: the shards are not of one model",
                 name_, excerpt(tensor), excerpt(file));
  }
}

const std::byte* ModelFiles::bytes_of(const std::string& name, const std::string& dtype,
                                      std::span<const int64_t> shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return nullptr;
  const TensorInfo& tensor = found->second;
  const bool same = tensor.dtype == dtype && std::ranges::equal(tensor.shape, shape);
  return same ? tensor.bytes.data() : nullptr;
}

void ModelFiles::fail_missing(const std::string& name) const {
  fail_usage("'{}': tensor '{}' is missing: none of the shards has it", name_, excerpt(name));
}

std::vector<std::string> model_file_names(const std::string& folder) {
  std::vector<std::string> names = files_like(folder, {kSafetensors});
  for (std::string& name : names) name.insert(0, folder + "/");
  return names;
}

}  // namespace fw
