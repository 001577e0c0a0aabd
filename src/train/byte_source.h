// The bytes of a text one piece after the other, unpacked where they are packed: gzip and Zstandard are known by their
// first bytes, whatever the file is called. Memory is bounded (a few hundred KB; Zstandard's window, at most 128 MiB,
// beside it), however much a file unpacks to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace fw {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // The next bytes, as many as fit where they are there; 0: the end. Throws Error(kUsage) naming the file when it is
  // damaged or ends in the middle of what was packed, Error(kIo) when it cannot be read.
  virtual size_t read(std::span<char> out) = 0;
};

// Without the byte order mark of UTF-8. "-" is standard input, of which what has been read is gone; waiting for it ends
// as base/stop.h says. Error(kUsage) for a file that is missing, unreadable, a folder, a device or a pipe; for Parquet,
// which this program does not read (it says how to convert). For .xz, .bz2, .lz4, .zip and .7z, known by their first
// bytes; and for a name that ends in .gz or .zst on a file that is neither. Reading throws Error(kUsage) for UTF-16 and
// UTF-32, known by their byte order marks.
std::unique_ptr<ByteSource> open_bytes(const std::string& path);

// Of a text that was read otherwise, which `name` names: the same.
void drop_byte_order_mark(std::string& text, const std::string& name);

// gzip, Zstandard, or "" for a file that is packed as neither or not there.
std::string packing_of(const std::string& path);

}  // namespace fw
