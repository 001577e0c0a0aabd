#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file_lock.h"

namespace fw {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  // 0, or the error of close(): network file systems report a full disk only here.
  int close() { return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno; }

 private:
  int fd_;
};

Descriptor open_for_reading(const std::string& path, struct stat* info) {
  // Without O_NONBLOCK a named pipe would wait here for somebody to write to it.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail_usage("cannot open '{}': {}", path, reason(errno));
  if (::fstat(file.get(), info) != 0) fail_usage("cannot open '{}': {}", path, reason(errno));
  if (S_ISDIR(info->st_mode)) fail_usage("cannot read '{}': expected a file, it is a folder", path);
  if (!S_ISREG(info->st_mode)) fail_usage("cannot read '{}': expected a regular file, it is a device or a pipe", path);
  return file;
}

// All that comes from `fd`; `expected` bytes are only a guess: pipes say none, and files of /proc say 0.
std::string read_all(int fd, const std::string& path, size_t expected, size_t max_bytes) {
  std::string content;
  size_t used = 0;
  content.resize(expected + 1);
  for (;;) {
    if (used == content.size()) content.resize(std::max<size_t>(content.size() * 2, 65536));
    const ssize_t n = ::read(fd, content.data() + used, std::min(content.size() - used, size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_usage("cannot read '{}': {}", path, reason(errno));
    if (n == 0) break;
    used += static_cast<size_t>(n);
    if (used > max_bytes) fail_usage("cannot read '{}': expected at most {} bytes, it has more", path, max_bytes);
  }
  content.resize(used);
  return content;
}

std::string parent_folder(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Appends to a descriptor through a buffer; every failure names the path that the user knows.
class Output {
 public:
  Output(int fd, const std::string& path) : fd_(fd), path_(path) {}

  void append(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() <= kBuffer) {
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
      return;
    }
    flush();
    if (bytes.size() >= kBuffer) {
      write_all(bytes);
    } else {
      buffer_.assign(bytes.begin(), bytes.end());
    }
  }

  void flush() {
    write_all(buffer_);
    buffer_.clear();
  }

 private:
  static constexpr size_t kBuffer = size_t{1} << 18;

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), std::min(bytes.size(), size_t{1} << 30));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_io("cannot write '{}': {}", path_, reason(errno));
      // Zero bytes taken without an error: the device is full in a way that write() has no code for.
      if (n == 0) fail_io("cannot write '{}': {}", path_, reason(ENOSPC));
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
  }

  int fd_;
  const std::string& path_;
  std::vector<std::byte> buffer_;
};

constexpr std::string_view kSide = ".tmp-";
constexpr size_t kSideDigits = 12;

std::string random_digits() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits))
    fail_io("the system gave no random number: {}", reason(errno));
  return fmt::format("{:016x}", bits).substr(0, kSideDigits);
}

// Whether `name` is one of a file written aside, of `target` or ("") of any.
bool is_side_name(std::string_view name, std::string_view target) {
  const size_t digits = name.size() - std::min(name.size(), kSideDigits);
  return name.size() > kSideDigits + kSide.size() &&
         name.find_first_not_of("0123456789abcdef", digits) == std::string_view::npos &&
         name.substr(0, digits).ends_with(kSide) && (target.empty() || name.substr(0, digits - kSide.size()) == target);
}

void remove_if_abandoned(const std::string& path) {
  constexpr int kHow = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  int fd = ::open(path.c_str(), O_RDWR | kHow);
  if (fd < 0 && errno == EACCES) fd = ::open(path.c_str(), O_RDONLY | kHow);
  const Descriptor file(fd);
  struct stat info = {};
  if (fd < 0 || ::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return;
  // Locked while its name goes: one that makes a file of this name sees that, and takes another.
  if (try_lock(fd) == FileLock::kTaken && is_file_at(fd, path)) ::unlink(path.c_str());
}

// target: the name of a file in the folder; "": of any.
void remove_abandoned(const std::string& folder, std::string_view target) {
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (is_side_name(entry->path().filename().string(), target)) remove_if_abandoned(entry->path().string());
  }
}

// The file written aside; removed again unless it was renamed into place.
class SideFile {
 public:
  SideFile(const std::string& target, const std::string& shown)
      : target_(target), shown_(shown), file_(create()), lock_(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)) {}
  SideFile(const SideFile&) = delete;
  SideFile& operator=(const SideFile&) = delete;
  ~SideFile() {
    if (!renamed_) ::unlink(side_.c_str());
  }
  int fd() const { return file_.get(); }

  void commit() {
    if (::fsync(file_.get()) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
    if (const int error = file_.close()) fail_io("cannot write '{}': {}", shown_, reason(error));
    if (::rename(side_.c_str(), target_.c_str()) != 0) fail_io("cannot write '{}': {}", shown_, reason(errno));
    renamed_ = true;
    sync_folder(parent_folder(target_));
  }

 private:
  int create() {
    remove_abandoned(parent_folder(target_), std::filesystem::path(target_).filename().string());
    for (int tries = 0;; ++tries) {
      side_ = fmt::format("{}{}{}", target_, kSide, random_digits());
      const int fd = ::open(side_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
      if (fd < 0 && (errno != EEXIST || tries == 1000)) fail_io("cannot write '{}': {}", shown_, reason(errno));
      if (fd < 0) continue;
      // Before it had its lock another process may have taken it for one that was left.
      if (try_lock(fd) != FileLock::kBusy && is_file_at(fd, side_)) return fd;
      ::close(fd);
    }
  }

  const std::string& target_;
  const std::string& shown_;
  std::string side_;
  Descriptor file_, lock_;  // lock_: the same opening, whose lock outlives close() until the file has its name
  bool renamed_ = false;
};

// Devices and pipes (/dev/stdout) cannot be replaced: they are written in place.
void write_in_place(const std::string& path, const std::function<void(const FileSink&)>& write) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) fail_io("cannot write '{}': {}", path, reason(errno));
  Output out(file.get(), path);
  write([&out](std::span<const std::byte> bytes) { out.append(bytes); });
  out.flush();
  if (const int error = file.close()) fail_io("cannot write '{}': {}", path, reason(error));
}

}  // namespace

std::string read_file(const std::string& path, size_t max_bytes) {
  struct stat info = {};
  const Descriptor file = open_for_reading(path, &info);
  const size_t size = static_cast<size_t>(info.st_size);
  if (size > max_bytes) fail_usage("cannot read '{}': expected at most {} bytes, it has {}", path, max_bytes, size);
  return read_all(file.get(), path, size, max_bytes);
}

std::string read_file_or_input(const std::string& path, size_t max_bytes) {
  return path == "-" ? read_all(STDIN_FILENO, "standard input", 0, max_bytes) : read_file(path, max_bytes);
}

std::string file_start(const std::string& path, size_t count) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info = {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return {};
  std::string bytes(count, '\0');
  const ssize_t n = ::pread(file.get(), bytes.data(), count, 0);
  bytes.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return bytes;
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat first = {}, second = {};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

void write_file_atomic(const std::string& path, std::string_view content) {
  write_file_atomic(
      path, [content](const FileSink& sink) { sink(std::as_bytes(std::span(content.data(), content.size()))); });
}

void write_file_atomic(const std::string& path, const std::function<void(const FileSink&)>& write) {
  // A symbolic link keeps pointing at its target, and the target is what is replaced.
  std::error_code ignored;
  std::string target = path;
  if (std::filesystem::is_symlink(path, ignored)) {
    const std::filesystem::path resolved = std::filesystem::weakly_canonical(path, ignored);
    if (!ignored) target = resolved.string();
  }
  struct stat old = {};
  const bool exists = ::stat(target.c_str(), &old) == 0;
  if (exists && S_ISDIR(old.st_mode)) fail_io("cannot write '{}': expected a file, it is a folder", path);
  if (exists && !S_ISREG(old.st_mode)) return write_in_place(path, write);

  SideFile side(target, path);
  if (exists && ::fchmod(side.fd(), old.st_mode & 07777) != 0) fail_io("cannot write '{}': {}", path, reason(errno));
  Output out(side.fd(), path);
  write([&out](std::span<const std::byte> bytes) { out.append(bytes); });
  out.flush();
  side.commit();
}

void remove_abandoned(const std::string& folder) { remove_abandoned(folder, {}); }

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_io("cannot make the folder '{}': {}", path, error.message());
  if (!std::filesystem::is_directory(path, error)) fail_io("cannot make the folder '{}': {}", path, reason(ENOTDIR));
}

bool file_exists(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0;
}

void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) fail_io("cannot open the folder '{}': {}", path, reason(errno));
  // Some network file systems cannot sync a folder and say EINVAL; there is nothing more to ask of them.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) fail_io("cannot sync the folder '{}': {}", path, reason(errno));
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  struct stat info = {};
  const Descriptor file = open_for_reading(path, &info);
  if (info.st_size == 0) return;
  void* p = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (p == MAP_FAILED) fail_io("cannot map '{}': {}", path, reason(errno));
  data_ = static_cast<const std::byte*>(p);
  size_ = static_cast<size_t>(info.st_size);
}

void MappedFile::forget(std::span<const std::byte> part) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(part.data()) + page - 1) / page * page,
                  end = (reinterpret_cast<uintptr_t>(part.data()) + part.size()) / page * page;
  if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);  // a hint
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

}  // namespace fw
