// A folder that one process at a time works in. The file .lock in it is locked and says which host and process it is.
// The lock is flock, which the system takes back when the process ends, however it ends. The file goes with the value;
// one that a crash leaves behind is locked by nobody and hinders nobody.
#pragma once

#include <string>

#include "base/error.h"

namespace fw {

inline constexpr const char* kLockFile = ".lock";

// What the constructor throws when another process has the folder.
class FolderLocked : public Error {
 public:
  explicit FolderLocked(const std::string& message) : Error(ErrorKind::kUsage, message) {}
};

class FolderLock {
 public:
  // The folder must exist. FolderLocked naming host and process when another process has it, Error(kIo) when the file
  // cannot be made. On a file system that has no locks nothing is locked.
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace fw
