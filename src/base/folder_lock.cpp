#include "base/folder_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/file_lock.h"

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

// 0, or the error.
int write_all(int fd, std::string_view text) {
  for (off_t at = 0; !text.empty();) {
    const ssize_t n = ::pwrite(fd, text.data(), text.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ENOSPC;
    text.remove_prefix(static_cast<size_t>(n));  // a part is no error; the rest says why
    at += n;
  }
  return 0;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : path_(folder + "/" + kLockFile) {
  for (;;) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ < 0) fail_io("cannot write '{}': {}", path_, reason(errno));
    // A hard link could be a file of somebody else's, which is about to be written.
    struct stat info = {};
    if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink > 1) {
      ::close(std::exchange(fd_, -1));
      fail_io("cannot write '{}': expected a file of one name, it is a link, a device or a folder: remove it", path_);
    }
    const FileLock lock = try_lock(fd_);
    if (lock == FileLock::kNone) return;
    if (lock == FileLock::kBusy) {
      const std::string by = owner(fd_);
      ::close(std::exchange(fd_, -1));
      throw FolderLocked(fmt::format("'{}' is in use by {}: wait for its end, or choose another folder", folder, by));
    }
    // Whoever had it may have removed the file between our open and our lock: then what is locked here is nothing.
    if (is_file_at(fd_, path_)) break;
    ::close(std::exchange(fd_, -1));
  }
  const int error = ::ftruncate(fd_, 0) != 0 ? errno : write_all(fd_, this_process());
  if (error != 0) {
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
