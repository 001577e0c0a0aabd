// safetensors files: an 8-byte little-endian header length, a JSON header, raw little-endian tensors. The reader trusts
// nothing: every offset, shape and dtype is checked against the file before a byte is used (it is fuzzed). Files
// written here carry a checksum in their metadata ("fastweight_checksum"), which the reader checks, so that a flipped
// bit anywhere in header or tensors is an error. Files of other programs have none and are taken as they are.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace fw {

struct TensorInfo {
  std::string dtype;  // "F32", "F64", "BF16", "F16", "I64", "I32", "U8", "BOOL", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  int64_t count() const;
};

class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);  // maps the file
  // for the fuzzer and tests; content must outlive it
  SafetensorsReader(std::span<const std::byte> content, const std::string& name);
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Converts F32, F64, BF16, F16 to T (float, double); int32_t and int64_t from I32 and I64; uint8_t from U8. Throws
  // Error(kUsage) naming file, tensor, what was expected and what came, when it is missing or dtype or shape differ.
  template <class T>
  void read(const std::string& name, std::span<const int64_t> shape, std::span<T> out) const;
  // Of a mapped file: its memory is free until the bytes are read again.
  void forget(std::span<const std::byte> bytes) const { map_.forget(bytes); }

 private:
  void parse(std::span<const std::byte> content);
  MappedFile map_;
  std::string name_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Collects tensors (memory stays the caller's until write) and writes them atomically: the widest elements first, then
// by name, the header padded to 8, so that every tensor is aligned. write() throws Error(kIo) and leaves an old file as
// it was.
class SafetensorsWriter {
 public:
  void add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
           std::span<const std::byte> bytes);
  template <class T>  // float -> F32, double -> F64, int32_t -> I32, int64_t -> I64, uint8_t -> U8
  void add(const std::string& name, std::vector<int64_t> shape, std::span<const T> values);
  // The same of values that have no other owner: a copy of them lives as long as the writer.
  template <class T>
  void add_copy(const std::string& name, std::vector<int64_t> shape, std::span<const T> values);
  void set_metadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  void write(const std::string& path) const;

 private:
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::deque<std::vector<std::byte>> copies_;
};

}  // namespace fw
