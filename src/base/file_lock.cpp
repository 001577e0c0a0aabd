#include "base/file_lock.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

namespace fw {

FileLock try_lock(int fd) {
  for (;;) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return FileLock::kTaken;
    if (errno != EINTR) return errno == EWOULDBLOCK ? FileLock::kBusy : FileLock::kNone;
  }
}

bool is_file_at(int fd, const std::string& path) {
  struct stat held = {}, there = {};
  return ::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &there) == 0 && held.st_ino == there.st_ino &&
         held.st_dev == there.st_dev;
}

}  // namespace fw
