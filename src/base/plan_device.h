// PlanDevice: a device that computes nothing and counts the memory that a computation would take on the host. Its allocations are
// address space that nothing may touch; what is copied into it is dropped, and what is read from it is zeros. A model that is made
// with it runs its passes as any other, with operations that only allocate (ops/planned.h): so the memory of a run is known before it
// is taken, by the code that takes it.
#pragma once

#include <unordered_map>

#include "base/device.h"

namespace fw {

class PlanDevice final : public Device {
 public:
  PlanDevice() = default;
  PlanDevice(const PlanDevice&) = delete;
  PlanDevice& operator=(const PlanDevice&) = delete;
  ~PlanDevice() override;

  size_t bytes() const { return bytes_; }  // allocated now
  size_t peak_bytes() const override { return peak_; }

  fw_device kind() const override { return FW_DEVICE_CPU; }
  size_t alignment() const override { return host_device().alignment(); }
  bool host_memory() const override { return false; }
  void* allocate(size_t bytes) override;
  void release(void* memory) noexcept override;
  void from_host(void*, const void*, size_t) override {}
  void to_host(void* to, const void*, size_t bytes) override;
  void copy(void*, const void*, size_t) override {}
  void fill(void*, int, size_t) override {}
  void synchronise() override {}

 private:
  std::unordered_map<void*, size_t> allocations_;
  size_t bytes_ = 0, peak_ = 0;
};

// Whether it is a PlanDevice: nothing may be computed with its memory.
bool only_plans(const Device& device);

}  // namespace fw
