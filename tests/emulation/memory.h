// The emulated device's memory: pages that fault when they are touched, as a GPU's memory does when the host follows a
// pointer to it. They do not fault while a kernel runs and in the copies of the device itself (`Open`). Every piece
// ends at the end of its last page and has a page in front and after that is never there, so that kernels that leave a
// piece by much fault too.
#pragma once

#include <cstddef>

namespace fw::cuda::emulation {

void* allocate(std::size_t bytes);  // aligned to 256; throws std::bad_alloc
void release(void* memory) noexcept;

// While one lives, all of it may be touched, by any thread.
class Open {
 public:
  Open();
  ~Open();
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
};

}  // namespace fw::cuda::emulation
