#include "cli/outputs.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "train/text_source.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

// What train writes into its folder: files, and folders whose files are all its own.
constexpr std::array<std::string_view, 7> kRunFiles = {"config.toml", "test.json", "metrics.jsonl", "metrics.csv",
                                                       "loss.svg",    "loss.png",  "samples.jsonl"};
constexpr std::array<std::string_view, 5> kRunFolders = {"best", "data", "model", "checkpoints", "tensorboard"};

// What a sweep and an evaluation write into theirs.
constexpr std::array<std::string_view, 16> kResultFiles = {"results.json",
                                                           "table.md",
                                                           "accuracy.svg",
                                                           "accuracy.png",
                                                           "accuracy-lengths.svg",
                                                           "accuracy-lengths.png",
                                                           "contexts.svg",
                                                           "contexts.png",
                                                           "contexts-hybrids.svg",
                                                           "contexts-hybrids.png",
                                                           "contexts-ablations.svg",
                                                           "contexts-ablations.png",
                                                           "result.json",
                                                           "curve.json",
                                                           "eval.json",
                                                           "samples.jsonl"};
constexpr std::array<std::string_view, 1> kResultFolders = {"cells"};
// Of a model's folder, beside all that begins with tokenizer or ends in .safetensors, .model or .bin.
constexpr std::array<std::string_view, 13> kModelFiles = {"config.json",
                                                          "generation_config.json",
                                                          "special_tokens_map.json",
                                                          "added_tokens.json",
                                                          "vocab.json",
                                                          "vocab.txt",
                                                          "merges.txt",
                                                          "best.json",
                                                          "trainer.json",
                                                          "chat_template.jinja",
                                                          "chat_template.json",
                                                          "model.safetensors.index.json",
                                                          "pytorch_model.bin.index.json"};

template <class Names>
bool has(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Whether a file of this place in a folder is one that the folder is read for, or that went into making it.
bool belongs_to(PathUse use, const fs::path& relative) {
  const std::string first = relative.begin()->string(), name = relative.filename().string();
  if (has(kRunFolders, first) || (use == PathUse::kResults && has(kResultFolders, first))) return true;
  if (relative.has_parent_path()) return false;
  if (has(kRunFiles, name) || has(kModelFiles, name) || name.starts_with("tokenizer")) return true;
  for (const char* ending : {".safetensors", ".model", ".bin"}) {
    if (name.ends_with(ending)) return true;
  }
  return use == PathUse::kResults && has(kResultFiles, name);
}

// The file that is read and is also `path`; "": there is none.
std::string read_as(PathUse use, const std::string& input, const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(input, error)) return same_file(path, input) ? input : "";
  constexpr int kDeepest = 8;
  for (fs::recursive_directory_iterator entry(input, fs::directory_options::skip_permission_denied, error), end;
       !error && entry != end; entry.increment(error)) {
    if (entry.depth() >= kDeepest) entry.disable_recursion_pending();
    const fs::path relative = entry->path().lexically_relative(input);
    if (!relative.empty() && belongs_to(use, relative) && same_file(path, entry->path().string()))
      return entry->path().string();
  }
  return "";
}

// What an option that is read names. "books/*.txt:0.7" is a pattern with a weight.
StringList paths_of(const Option& option) {
  StringList paths;
  for (const std::string& word : words_of(option.target)) {
    const size_t colon = word.rfind(':');
    const bool weighted = colon != std::string::npos && colon > 0 && !file_exists(word) &&
                          word.find_first_not_of("0123456789.+-eE", colon + 1) == std::string::npos;
    const std::string pattern = weighted ? word.substr(0, colon) : word;
    if (option.path == PathUse::kReads && pattern.find_first_of("*?[") != std::string::npos && !file_exists(pattern)) {
      try {
        const StringList found = expand_glob(pattern);
        paths.insert(paths.end(), found.begin(), found.end());
      } catch (const Error&) {  // of nothing; whoever reads it says so
      }
    } else if (pattern != "-") {
      paths.push_back(pattern);
    }
  }
  return paths;
}

bool is_read(const Option& option) { return option.path != PathUse::kNone && option.path != PathUse::kWrites; }

// At most three of the names in a folder, the rest as dots; "" when it is empty or not there. The lock of a run is
// nobody's.
std::string names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name != ".lock") names.push_back(name);
  }
  if (error && fs::exists(folder)) fail_usage("cannot read the folder '{}': {}", folder, error.message());
  std::sort(names.begin(), names.end());
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", " : "") + names[i];
  return names.size() > kShown ? text + ", ..." : text;
}

fs::path canonical(const std::string& path) {
  std::error_code error;
  fs::path found = fs::weakly_canonical(path, error);
  return error ? fs::path(path) : found;
}

// Whether the run replaces it.
bool is_part_of_run(const std::string& run, const std::string& input) {
  const fs::path inside = canonical(input).lexically_relative(canonical(run));
  if (inside.empty()) return false;
  const std::string first = inside.begin()->string();
  const bool alone = std::next(inside.begin()) == inside.end();
  return has(kRunFolders, first) || (alone && has(kRunFiles, first));
}

bool is_run_folder(const std::string& path) {
  const std::string head = std::string("# ") + kRunFileComment;
  return file_start(path + "/config.toml", head.size()) == head || file_exists(path + "/data/fingerprint");
}

}  // namespace

StringList paths_read(const Options& options) {
  StringList paths;
  for (const Option& option : options.entries()) {
    if (!is_read(option)) continue;
    const StringList more = paths_of(option);
    paths.insert(paths.end(), more.begin(), more.end());
  }
  return paths;
}

void check_not_read(const Options& options, const std::string& option, const std::string& path,
                    const std::string& with) {
  for (const Option& read : options.entries()) {
    if (!is_read(read) || read.flag == with || !file_exists(path)) continue;
    for (const std::string& input : paths_of(read)) {
      const std::string found = read_as(read.path, input, path);
      if (!found.empty())
        fail_usage("{}: '{}' is what this command reads ('{}', of {}), and would be replaced: give another name",
                   option, path, found, read.flag);
    }
  }
}

void check_output(const Options& options, const std::string& option, const std::string& path, const std::string& with) {
  if (path.empty()) fail_usage("{}: expected the name of a file, got nothing", option);
  check_not_read(options, option, path, with);
  std::error_code error;
  if (fs::is_directory(path, error)) fail_usage("{}: expected the name of a file, '{}' is a folder", option, path);
  const fs::path parent = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (!fs::is_directory(parent, error))
    fail_usage("{}: cannot write '{}': there is no folder '{}'", option, path, parent.string());
  const bool replaced = !fs::exists(path, error) || fs::is_regular_file(path, error);  // devices are written in place
  const std::string asked = replaced ? parent.string() : path;
  if (::access(asked.c_str(), replaced ? W_OK | X_OK : W_OK) != 0) {
    fail_usage("{}: cannot write '{}': {}", option, path, std::generic_category().message(errno));
  }
}

void check_new_folder(const std::string& option, const std::string& path) {
  if (path.empty()) fail_usage("{}: expected the name of a folder, got nothing", option);
  if (file_exists(path + "/config.json"))
    fail_usage("{}: '{}' has a model already: choose another folder or remove it", option, path);
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error))
    fail_usage("{}: expected a folder, '{}' is a file", option, path);
  const std::string names = names_in(path);
  if (!names.empty())
    fail_usage("{}: expected a new or an empty folder, '{}' holds {}: choose another", option, path, names);
}

NewFolder::NewFolder(const std::string& option, const std::string& path) : path_(path) {
  check_new_folder(option, path);
  std::error_code error;
  for (fs::path folder = fs::path(path).lexically_normal(); !folder.empty() && !fs::exists(folder, error);
       folder = folder.parent_path()) {
    if (folder.has_filename()) made_.insert(made_.begin(), folder.string());
    if (folder == folder.parent_path()) break;
  }
  try {
    make_folders(path);
    lock_.emplace(path);
    check_new_folder(option, path);  // again: another command may have filled it before the lock
  } catch (const FolderLocked&) {
    made_.clear();  // whoever has it made it too
    throw;
  } catch (...) {
    std::for_each(made_.rbegin(), made_.rend(), [](const std::string& folder) { ::rmdir(folder.c_str()); });
    throw;
  }
}

NewFolder::~NewFolder() {
  std::error_code error;
  if (!kept_) {
    std::vector<fs::path> inside;
    for (fs::directory_iterator entry(path_, error), end; !error && entry != end; entry.increment(error)) {
      if (entry->path().filename() != kLockFile) inside.push_back(entry->path());
    }
    for (const fs::path& entry : inside) fs::remove_all(entry, error);
  }
  lock_.reset();
  if (kept_) return;
  std::for_each(made_.rbegin(), made_.rend(), [](const std::string& folder) { ::rmdir(folder.c_str()); });
}

void check_run_folder(const Options& options, const std::string& path) {
  for (const std::string& input : paths_read(options)) {
    if (!is_part_of_run(path, input)) continue;
    fail_usage("--out: the run would replace '{}', which it reads, in its folder '{}': choose another folder{}", input,
               path, fs::path(input).filename() == "config.toml" ? ", or go on with --resume" : "");
  }
  const std::string names = names_in(path);
  if (!names.empty() && !is_run_folder(path)) {
    fail_usage("--out: '{}' holds {} and no run of this program: choose a new folder, such as '{}'", path, names,
               (fs::path(path) / "run").string());
  }
}

}  // namespace fw::cli
