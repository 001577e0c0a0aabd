#include "base/growing_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/file_lock.h"

namespace fw {
namespace {

constexpr size_t kBuffer = size_t{1} << 18;

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

GrowingFile::GrowingFile(const std::string& path, const std::string& shown) : path_(path), shown_(shown) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
  if (fd < 0) fail_io("cannot write '{}': {}: {}", shown, path, reason(errno));
  struct stat info = {};
  std::string problem;
  if (::fstat(fd, &info) != 0)
    problem = reason(errno);
  else if (!S_ISREG(info.st_mode))
    problem = "not a regular file";
  else if (info.st_nlink > 1)
    problem = "a hard link, which may be another file: remove it";
  else if (try_lock(fd) == FileLock::kBusy)
    problem = "another process is writing it";
  if (!problem.empty()) {
    ::close(fd);
    fail_io("cannot write '{}': {}: {}", shown, path, problem);
  }
  fd_ = fd;
  size_ = static_cast<uint64_t>(info.st_size);
}

GrowingFile::~GrowingFile() {
  if (fd_ >= 0) ::close(fd_);
}

void GrowingFile::flush() {
  overwrite(size_, buffer_);
  size_ += buffer_.size();
  buffer_.clear();
}

void GrowingFile::append(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() > kBuffer) flush();
  if (bytes.size() > kBuffer) {
    overwrite(size_, bytes);
    size_ += bytes.size();
  } else {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
}

void GrowingFile::overwrite(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), std::min(bytes.size(), size_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_io("cannot write '{}': {}", shown_, reason(n < 0 ? errno : ENOSPC));
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

void GrowingFile::read(uint64_t offset, const std::function<void(std::span<const std::byte>)>& take) {
  flush();
  std::vector<std::byte> piece(kBuffer);
  for (;;) {
    const ssize_t n = ::pread(fd_, piece.data(), piece.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("cannot read '{}': {}", path_, reason(errno));
    if (n == 0) return;
    take(std::span(piece).first(static_cast<size_t>(n)));
    offset += static_cast<uint64_t>(n);
  }
}

void GrowingFile::truncate(uint64_t size) {
  flush();
  if (size > size_) fail_internal("'{}': {} bytes asked for of {}", path_, size, size_);
  if (::ftruncate(fd_, static_cast<off_t>(size)) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
  size_ = size;
}

void GrowingFile::sync() {
  flush();
  if (::fsync(fd_) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
}

void GrowingFile::replace(const std::string& target) {
  struct stat old = {};
  if (::stat(target.c_str(), &old) == 0 && ::fchmod(fd_, old.st_mode & 07777) != 0)
    fail_io("cannot write '{}': {}", shown_, reason(errno));
  sync();
  if (::rename(path_.c_str(), target.c_str()) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
  if (::close(std::exchange(fd_, -1)) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
  const std::string folder = std::filesystem::path(target).parent_path().string();
  sync_folder(folder.empty() ? "." : folder);
}

void GrowingFile::remove() {
  ::unlink(path_.c_str());
  ::close(std::exchange(fd_, -1));
}

}  // namespace fw
