// PlanDevice: a device that computes nothing and counts the memory that a computation would take on the host, or on a
// CUDA device, which need not be there. Its allocations are address space that nothing may touch; what is copied into
// it is dropped, and what is read from it is zeros. A model that is made with it runs its passes as any other, with
// operations that only allocate (ops/cpu/planned.cpp, ops/planned_cuda.cpp). So the memory of a run is known before it
// is taken, by the code that takes it.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "base/device.h"

namespace fw {

class PlanDevice final : public Device {
 public:
  // A plan of the host's memory, or of a CUDA device's.
  explicit PlanDevice(fw_device kind = FW_DEVICE_CPU) : kind_(kind) {}
  PlanDevice(const PlanDevice&) = delete;
  PlanDevice& operator=(const PlanDevice&) = delete;
  ~PlanDevice() override;

  size_t bytes() const { return bytes_; }  // allocated now
  size_t peak_bytes() const override { return peak_; }
  // Of memory that was allocated before it was known how much of it would be needed (an arena's block): so many bytes
  // of it are in use.
  void note_used(const void* memory, size_t bytes) {
    size_t& most = used_[memory];
    most = std::max(most, bytes);
  }
  void forget_used(const void* memory) { used_.erase(memory); }
  // The most of them; 0: nothing was noted.
  size_t most_used(const void* memory) const {
    const auto found = used_.find(memory);
    return found == used_.end() ? 0 : found->second;
  }

  fw_device kind() const override { return kind_; }
  size_t alignment() const override { return kind_ == FW_DEVICE_CPU ? host_device().alignment() : 256; }
  bool host_memory() const override { return false; }
  void* allocate(size_t bytes) override;
  void release(void* memory) noexcept override;
  void from_host(void*, const void*, size_t) override {}
  void to_host(void* to, const void*, size_t bytes) override;
  void copy(void*, const void*, size_t) override {}
  void fill(void*, int, size_t) override {}
  void synchronise() override {}

 private:
  fw_device kind_;
  std::unordered_map<void*, size_t> allocations_;
  std::unordered_map<const void*, size_t> used_;
  size_t bytes_ = 0, peak_ = 0;
};

// Whether it is a PlanDevice: nothing may be computed with its memory.
bool only_plans(const Device& device);

}  // namespace fw
