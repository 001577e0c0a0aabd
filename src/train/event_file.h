// Scalars for TensorBoard: an event file, which its viewer finds by "tfevents" in the name.
//
// The file is a row of records, little-endian:
//     u64 length, u32 masked CRC-32C of those 8 bytes, the payload, u32 masked CRC-32C of the payload
// A payload is a protocol buffer: wall_time (field 1, double), step (2, varint), then one of
// - file_version (3, only the first record),
// - summary (5): values (1) of a tag (1) and a number (2, float).
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace fw {

struct EventScalar {
  const char* tag;
  double value;
};

class EventFile {
 public:
  // Opens `path` to append, after dropping what an earlier run wrote after step `step` and everything from the first
  // record on that is cut short or damaged: a viewer would not read on there either. Throws Error(kIo).
  EventFile(const std::string& path, int64_t step);
  // One record of all scalars; wall_time in seconds since 1970. Throws Error(kIo).
  void append(int64_t step, double wall_time, std::span<const EventScalar> scalars);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void write(std::string_view payload);

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace fw
