// The host as a device: its memory is the host's and its work is done when a call returns.
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/device.h"

namespace fw {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, the longest vector

class HostDevice final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CPU; }
  size_t alignment() const override { return kAlignment; }
  bool host_memory() const override { return true; }

  void* allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void release(void* memory) noexcept override { std::free(memory); }
  void from_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void to_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void fill(void* to, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(to, byte, bytes);
  }
  void synchronise() override {}
};

}  // namespace

Device& host_device() {
  static HostDevice instance;
  return instance;
}

}  // namespace fw
