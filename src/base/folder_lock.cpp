#include "base/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace fw {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

std::string this_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return fmt::format("process {} on {}\n", ::getpid(), host[0] != '\0' ? host.data() : "a host without a name");
}

// What the one that has the lock wrote; it may be about to.
std::string owner(int fd) {
  std::array<char, 512> text{};
  const ssize_t n = ::pread(fd, text.data(), text.size(), 0);
  std::string found(text.data(), n > 0 ? static_cast<size_t>(n) : 0);
  found.resize(std::min(found.find('\n'), found.size()));
  for (char& c : found) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';  // it goes to a terminal
  }
  return found.empty() ? "another process" : found;
}

bool same_file(int fd, const std::string& path) {
  struct stat held {
  }, there{};
  return ::fstat(fd, &held) == 0 && ::stat(path.c_str(), &there) == 0 && held.st_ino == there.st_ino && held.st_dev == there.st_dev;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : path_(folder + "/" + kLockFile) {
  for (;;) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ < 0) fail_io("cannot write '{}': {}", path_, reason(errno));
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      const std::string by = owner(fd_);
      if (error != EWOULDBLOCK) return;  // there are no locks here
      ::close(std::exchange(fd_, -1));
      throw FolderLocked(fmt::format("'{}' is in use by {}: wait for its end, or choose another folder", folder, by));
    }
    // Whoever had it may have removed the file between our open and our lock: then what is locked here is nothing.
    if (same_file(fd_, path_)) break;
    ::close(std::exchange(fd_, -1));
  }
  const std::string text = this_process();
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    const int error = errno;
    ::unlink(path_.c_str());
    ::close(std::exchange(fd_, -1));
    fail_io("cannot write '{}': {}", path_, reason(error));
  }
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  ::unlink(path_.c_str());  // while it is locked, so that the file of the next one is not taken away
  ::close(fd_);
}

}  // namespace fw
