// Arena: 64-byte aligned scratch memory that grows by blocks and is released as a whole or back to a mark. Contexts of
// a forward pass live here until the backward pass has used them. Not thread safe: one per thread or per model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace fw {

class Arena {
 public:
  struct Mark {
    size_t block = 0;
    size_t used = 0;
  };

  explicit Arena(size_t block_bytes = size_t{4} << 20) : block_bytes_(block_bytes) {}

  // Memory for n values, not initialised; valid until release() or a rewind() to an earlier mark.
  template <class T>
  T* alloc(int64_t n) {
    static_assert(std::is_trivially_destructible_v<T>);
    return static_cast<T*>(alloc_bytes(sizeof(T) * static_cast<size_t>(n)));
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

 private:
  struct AlignedFree {
    void operator()(std::byte* p) const;
  };
  struct Block {
    std::unique_ptr<std::byte, AlignedFree> data;
    size_t bytes = 0;
    size_t used = 0;
  };

  void* alloc_bytes(size_t bytes);
  void* zeroed_bytes(size_t bytes);

  size_t block_bytes_;
  size_t current_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace fw
