#include "cli/run_config.h"

#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "model/adapters.h"
#include "train/checkpoint.h"

namespace fw::cli {

KeyTables key_tables(DataConfig& c) {
#define FW_KEY FW_KEY_ENTRY
  return {{"data",
           "Data",
           {
#include "cli/data.def"
           }}};
#undef FW_KEY
}

void validate(const DataConfig& data) {
  if (data.text.empty()) fail_usage("no text to train on: give a file with --text, or data.text in the run file");
  DataConfig copy = data;
  check_ranges(key_tables(copy), true);
  if (data.separator.find('\n') != std::string::npos)
    fail_usage("data.separator (--separator): expected one line without a line break");
}

namespace {

std::string absolute_path(const char* option, const std::string& path) {
  if (path.empty()) fail_usage("{}: expected the name of a file, got nothing", option);
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error)
    fail_io("{}: '{}' is relative to the working directory, which cannot be found: {}", option, path, error.message());
  return whole.lexically_normal().string();
}

}  // namespace

void make_paths_absolute(DataConfig& data, TrainConfig& train) {
  if (!train.from.empty()) train.from = absolute_path("from", train.from);
  for (std::string& path : data.text) path = absolute_path("text", path);
  if (!data.test.empty()) data.test = absolute_path("test", data.test);
  if (!data.valid.empty()) data.valid = absolute_path("valid", data.valid);
  if (!data.tokenizer.empty() && data.tokenizer != "bytes") data.tokenizer = absolute_path("tokenizer", data.tokenizer);
}

std::string describe(const ModelConfig& m) {
  std::string heads;
  if (m.has_recurrence()) heads = fmt::format(", {} heads of {}", m.num_heads, m.head_dim);
  if (m.has_recurrence() && (m.v_heads() != m.num_heads || m.head_v_dim() != m.head_dim))
    heads += fmt::format(" (values: {} of {})", m.v_heads(), m.head_v_dim());
  return fmt::format("{}, {} layers, width {}{}", m.mixers(), m.num_hidden_layers, m.hidden_size, heads);
}

std::string find_model_folder(const std::string& path) {
  namespace fs = std::filesystem;
  const auto is_model = [](const fs::path& folder) {
    return file_exists((folder / "config.json").string()) || is_adapter_folder(folder.string());
  };
  std::error_code error;
  if (!fs::is_directory(path, error))
    fail_usage("MODEL: expected a model or run folder, but there is no folder '{}'", path);
  if (is_model(path)) return path;
  if (is_model(fs::path(path) / "model")) return (fs::path(path) / "model").string();
  const std::string checkpoints = (fs::path(path) / "checkpoints").string();
  const std::vector<int64_t> steps = list_checkpoints(checkpoints);
  if (steps.empty())
    fail_usage("MODEL: '{}' has neither config.json nor model/ nor checkpoints/: it is not a model or run folder",
               path);
  return checkpoint_path(checkpoints, steps.back());
}

std::string base_of_adapters(const std::string& folder) {
  const std::string base = read_adapter_config(folder).base;
  const std::string what = fmt::format(
      "'{}': base_model_name_or_path: expected the folder of the model that the adapters belong to", folder);
  if (base.empty()) fail_usage("{}, got none: give MODEL and --adapter '{}'", what, folder);
  std::error_code error;
  if (!std::filesystem::is_directory(base, error))
    fail_usage("{}, but there is no folder '{}': give MODEL and --adapter '{}'", what, base, folder);
  return find_model_folder(base);
}

}  // namespace fw::cli
