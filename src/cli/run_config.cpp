#include "cli/run_config.h"

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
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

std::string describe(const ModelConfig& m) {
  std::string heads;
  if (m.has_recurrence()) heads = fmt::format(", {} heads of {}", m.num_heads, m.head_dim);
  if (m.has_recurrence() && (m.v_heads() != m.num_heads || m.head_v_dim() != m.head_dim))
    heads += fmt::format(" (values: {} of {})", m.v_heads(), m.head_v_dim());
  return fmt::format("{}, {} layers, width {}{}", m.mixers(), m.num_hidden_layers, m.hidden_size, heads);
}

std::string find_model_folder(const std::string& path) {
  namespace fs = std::filesystem;
  const auto is_model = [](const fs::path& folder) { return file_exists((folder / "config.json").string()); };
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

}  // namespace fw::cli
