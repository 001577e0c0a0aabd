// What a command is about to write, looked at before its work begins. It must be writable and must not be what the
// command reads (under whatever name). A folder that a command fills must be its own. Every refusal is an Error(kUsage)
// that names the option.
//
// What a command reads is known from its options alone (Option::path), with their values as they are when it is asked:
// files and those that patterns stand for. Of folders of models, runs, sweeps and evaluations the files that these
// commands write into them.
#pragma once

#include <optional>
#include <string>

#include "base/folder_lock.h"
#include "base/keys.h"
#include "cli/options.h"

namespace fw::cli {

// Of config.toml in a run folder; the folder is known again by it.
inline constexpr const char* kRunFileComment =
    "The resolved run: 'fastweight train' with this file and a new --out gives the same run.";
// The line behind it: which program made the run.
inline constexpr const char* kRunFileProgram = "# Made by ";

// The paths of all options that are read, patterns of files replaced by their files.
StringList paths_read(const Options& options);

// A file. `option` is what `path` comes from. `with`: the flag of an option that is read whose file may be replaced, as
// it has been read by then.
void check_output(const Options& options, const std::string& option, const std::string& path,
                  const std::string& with = {});

// Of that only that it is not read: of a file that lies beside an output while it is made.
void check_not_read(const Options& options, const std::string& option, const std::string& path,
                    const std::string& with = {});

// A folder that is filled by this command alone: it is not there yet, or is empty.
void check_new_folder(const std::string& option, const std::string& path);

// Such a folder while a command fills it: it is made and locked, and what is in it is removed unless keep() was called,
// the folder too where it was made here. Two commands that are given one folder do not mix their files: the second is
// refused.
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

// The folder of a run that begins: not there yet, empty, or left by an earlier run (which wrote its config.toml or
// data/fingerprint). Nothing that is read may be what the run replaces in it.
void check_run_folder(const Options& options, const std::string& path);

}  // namespace fw::cli
