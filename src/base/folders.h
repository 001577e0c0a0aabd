// Folders that last no longer than what they are for.
#pragma once

#include <string>
#include <vector>

namespace fw {

// A new folder in TMPDIR under a name that nobody can foresee, readable by this user alone. It goes with the value, and
// all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Makes folders before a command's work. Those that it made and that are empty at the end go again, so that a command
// that fails leaves none behind.
class NewFolders {
 public:
  NewFolders() = default;
  ~NewFolders();
  NewFolders(const NewFolders&) = delete;
  NewFolders& operator=(const NewFolders&) = delete;
  // With those above it. Error(kIo) when it cannot be made.
  void make(const std::string& path);

 private:
  std::vector<std::string> made_;  // those above first
};

}  // namespace fw
