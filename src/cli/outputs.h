// What a command is about to write, looked at before its work begins: it must be writable, it must not be what the command reads
// (under whatever name), and a folder that a command fills must be its own. Every refusal is an Error(kUsage) that names the option.
#pragma once

#include <optional>
#include <string>

#include "base/folder_lock.h"
#include "base/keys.h"

namespace fw::cli {

// Of config.toml in a run folder; the folder is known again by it.
inline constexpr const char* kRunFileComment = "The resolved run: 'fastweight train' with this file and a new --out gives the same run.";

// A file. inputs: paths that are read; those that are empty or not there do not matter.
void check_output(const std::string& option, const std::string& path, const StringList& inputs);

// A folder that is filled by this command alone: it is not there yet, or is empty.
void check_new_folder(const std::string& option, const std::string& path);

// Such a folder while a command fills it: it is made and locked, and what is in it is removed unless keep() was called, the folder too where it was made here.
// Two commands that are given one folder do not mix their files: the second is refused.
class NewFolder {
 public:
  NewFolder(const std::string& option, const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  void keep() { kept_ = true; }

 private:
  std::string path_;
  StringList made_;  // folders that were not there, the outermost first
  std::optional<FolderLock> lock_;
  bool kept_ = false;
};

// The folder of a run that begins: not there yet, empty, or left by an earlier run (which wrote its config.toml or data/fingerprint).
// None of the inputs may be what the run replaces in it.
void check_run_folder(const std::string& path, const StringList& inputs);

}  // namespace fw::cli
