// Arena: scratch memory of a device, aligned as the device wants it (host: 64 bytes, CUDA: 256), that grows by blocks
// and is released as a whole or back to a mark. A model has two: one of its device for activations, which live there
// until the backward pass has used them, and one of the host for the contexts that say where they lie. Not thread safe:
// one per thread or per model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/device.h"

namespace fw {

class Arena {
 public:
  struct Mark {
    size_t block = 0;
    size_t used = 0;
  };

  static constexpr size_t kBlockBytes = size_t{4} << 20;

  explicit Arena(size_t block_bytes = kBlockBytes) : Arena(host_device(), block_bytes) {}
  explicit Arena(Device& device, size_t block_bytes = kBlockBytes) : device_(&device), block_bytes_(block_bytes) {}

  // Memory for n values, not initialised; valid until release() or a rewind() to an earlier mark.
  template <class T>
  T* alloc(int64_t n) {
    static_assert(std::is_trivially_destructible_v<T>);
    return static_cast<T*>(
        alloc_bytes(sizeof(T) * static_cast<size_t>(n)));  // NOLINT(bugprone-sizeof-expression): T may be a pointer
  }
  // The same, filled with zero bytes.
  template <class T>
  T* alloc_zero(int64_t n) {
    static_assert(std::is_trivially_destructible_v<T>);
    return static_cast<T*>(zeroed_bytes(sizeof(T) * static_cast<size_t>(n)));
  }

  Mark mark() const { return {current_, current_ < blocks_.size() ? blocks_[current_].used : 0}; }
  void rewind(Mark mark);
  void release() { rewind({}); }  // keeps the blocks for the next pass
  size_t reserved_bytes() const;
  const Device& device() const { return *device_; }

 private:
  struct Release {
    Device* device;
    void operator()(std::byte* p) const { device->release(p); }
  };
  struct Block {
    std::unique_ptr<std::byte, Release> data;
    size_t bytes = 0;
    size_t used = 0;
  };

  void* alloc_bytes(size_t bytes);
  void* zeroed_bytes(size_t bytes);

  Device* device_;
  size_t block_bytes_;
  size_t current_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace fw
