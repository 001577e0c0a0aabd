// Files: read whole, map, and write so that a crash or a full disk never destroys what was there (written aside in the
// same folder, synced, renamed, folder synced). Every failure is an Error(kIo or kUsage) naming the path and the
// reason.
//
// A file written aside is PATH.tmp-XXXXXXXXXXXX, twelve random digits, so that no two processes of any host have one
// name, and its process has its lock (base/file_lock.h) until it is renamed. One that nobody has locked was left by a
// process that was killed: the next writing of PATH removes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace fw {

// Missing, unreadable, no regular file (a folder; a device or a named pipe, which may have no end or never begin), or
// larger than max_bytes: Error(kUsage).
std::string read_file(const std::string& path, size_t max_bytes = size_t{1} << 40);
// The same, where a user may ask for standard input with "-".
std::string read_file_or_input(const std::string& path, size_t max_bytes);
// At most the first `count` bytes; "" for what read_file() would refuse.
std::string file_start(const std::string& path, size_t count);
// Whether both are there and are one file, under whatever names.
bool same_file(const std::string& a, const std::string& b);

void write_file_atomic(const std::string& path, std::string_view content);
// The same for content written in pieces: `write` gets a sink that appends. An exception of `write` removes the side
// file.
using FileSink = std::function<void(std::span<const std::byte>)>;
void write_file_atomic(const std::string& path, const std::function<void(const FileSink&)>& write);

// Removes all files that killed processes left aside in a folder, for whatever they were.
void remove_abandoned(const std::string& folder);

void make_folders(const std::string& path);
bool file_exists(const std::string& path);
void sync_folder(const std::string& path);

// A read-only memory map; empty files map to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  // Gives back the memory of those of the bytes that fill pages; they are read again when they are looked at.
  void forget(std::span<const std::byte> part) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

}  // namespace fw
