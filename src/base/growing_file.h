// A file that grows beside the one it will replace, for results that take long to make: what was synced survives a
// crash and can be gone on with. While it is open no other process can open it as one (a lock that ends with the
// process). Every failure is an Error(kIo) that names the file it is for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace fw {

class GrowingFile {
 public:
  // Opens or makes `path`; `shown` is the name that errors have.
  GrowingFile(const std::string& path, const std::string& shown);
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  uint64_t size() const { return size_ + buffer_.size(); }
  void append(std::span<const std::byte> bytes);
  void truncate(uint64_t size);                                       // to at most size()
  void overwrite(uint64_t offset, std::span<const std::byte> bytes);  // bytes that are there
  // all from there on, piece by piece
  void read(uint64_t offset, const std::function<void(std::span<const std::byte>)>& take);
  // what was appended is on the disk
  void sync();
  const std::string& path() const { return path_; }

  // Synced, then `target` is this file (with the mode that target had); the object is done with.
  void replace(const std::string& target);
  void remove();

 private:
  void flush();
  std::string path_, shown_;
  int fd_ = -1;
  uint64_t size_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace fw
