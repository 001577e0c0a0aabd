#include "base/plan_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace fw {

PlanDevice::~PlanDevice() {
  for (const auto& [memory, bytes] : allocations_) ::munmap(memory, bytes);
}

void* PlanDevice::allocate(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  allocations_[memory] = bytes;
  bytes_ += bytes;
  peak_ = std::max(peak_, bytes_);
  return memory;
}

void PlanDevice::release(void* memory) noexcept {
  const auto found = allocations_.find(memory);
  if (found == allocations_.end()) return;
  bytes_ -= found->second;
  ::munmap(memory, found->second);
  allocations_.erase(found);
}

void PlanDevice::to_host(void* to, const void*, size_t bytes) {
  if (bytes > 0) std::memset(to, 0, bytes);
}

bool only_plans(const Device& device) { return dynamic_cast<const PlanDevice*>(&device) != nullptr; }

}  // namespace fw
