// Scratch memory of a thread, for kernels that need some for the length of a call.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/arena.h"

namespace fw {

// Scratch memory of the calling thread; everything taken through one object is given back at its end.
class LocalScratch {
 public:
  LocalScratch() : mark_(arena().mark()) {}
  ~LocalScratch() { arena().rewind(mark_); }
  LocalScratch(const LocalScratch&) = delete;
  LocalScratch& operator=(const LocalScratch&) = delete;

  template <class T>
  T* alloc(int64_t n) {
    return reinterpret_cast<T*>(arena().alloc<std::byte>(reserve(n * static_cast<int64_t>(sizeof(T)))));
  }
  template <class T>
  T* alloc_zero(int64_t n) {
    T* p = alloc<T>(n);
    std::fill_n(p, n, T(0));
    return p;
  }

 private:
  static constexpr int64_t kBlockBytes = int64_t{1} << 18;

  // What does not fit into a block gets a power of two, so that requests that grow from call to call find old blocks.
  static int64_t reserve(int64_t bytes) {
    return bytes <= kBlockBytes ? bytes : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  }

  static Arena& arena() {
    thread_local Arena instance(static_cast<size_t>(kBlockBytes));
    return instance;
  }
  Arena::Mark mark_;
};

}  // namespace fw
