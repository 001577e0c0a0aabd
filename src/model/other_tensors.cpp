#include "model/other_tensors.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/python_json.h"
#include "model/interop/hf_config.h"
#include "model/model_files.h"

namespace fw {
namespace {

constexpr const char* kOtherTensors = "/other_tensors.safetensors";

// "model.visual.blocks.0.x" -> "model.visual.", "mtp.fc.weight" -> "mtp."
std::string begin_of_name(const std::string& name) {
  const size_t first = name.find('.');
  const size_t end = name.starts_with("model.") ? name.find('.', first + 1) : first;
  return name.substr(0, end == std::string::npos ? end : end + 1);
}

}  // namespace

OtherTensors::OtherTensors(const std::string& folder) {
  const std::string config = folder + "/config.json";
  const nlohmann::json json = parse_python_config(read_file(config, size_t{1} << 20), "'" + config + "'");
  if (!is_hf_config(json)) {
    if (!file_exists(folder + kOtherTensors)) return;
    own_ = std::make_unique<SafetensorsReader>(folder + kOtherTensors);
    tensors_ = own_->tensors();
    return;
  }
  const HfNames names(json);
  source_ = std::make_unique<ModelFiles>(folder);
  for (const auto& [name, info] : source_->tensors()) {
    if (names.is_aside(name)) tensors_[name] = info;
  }
}

OtherTensors::~OtherTensors() = default;
OtherTensors::OtherTensors(OtherTensors&&) noexcept = default;

std::string OtherTensors::description() const {
  std::map<std::string, int> counts;
  for (const auto& [name, info] : tensors_) ++counts[begin_of_name(name)];
  std::string text;
  for (const auto& [begin, count] : counts)
    text += fmt::format("{}{} ({} tensor{})", text.empty() ? "" : ", ", begin, count, count == 1 ? "" : "s");
  return text;
}

void OtherTensors::add_to(SafetensorsWriter& writer) const {
  for (const auto& [name, info] : tensors_) writer.add(name, info.dtype, info.shape, info.bytes);
}

void OtherTensors::save(const std::string& folder) const {
  if (empty() || file_exists(folder + kOtherTensors)) return;
  SafetensorsWriter writer;
  writer.set_metadata("format", "pt");
  add_to(writer);
  writer.write(folder + kOtherTensors);
}

}  // namespace fw
