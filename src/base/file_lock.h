// The lock of an open file (flock). The system takes it back when the process that has it ends, however it ends, and
// knows it in every PID namespace; network file systems with locks know it on every host. So who has a file is asked of
// its lock, never of the number of a process.
#pragma once

#include <string>

namespace fw {

enum class FileLock {
  kTaken,  // it is ours until the last descriptor of this opening is closed
  kBusy,   // another process has it, or another opening of this one
  kNone,   // the file system has no locks
};
// Does not wait. The file must be open for writing, which network file systems want.
FileLock try_lock(int fd);

// Whether `path` is the file that is open: whoever had its lock before may have removed or replaced it.
bool is_file_at(int fd, const std::string& path);

}  // namespace fw
