// The device of a build whose kernels run in the emulation: its memory is the host's.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/device.h"
#include "base/error.h"

namespace fw {
namespace {

class EmulatedDevice final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CUDA; }
  size_t alignment() const override { return 256; }
  bool host_memory() const override { return false; }

  void* allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
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

Device& cuda_device() {
  static EmulatedDevice instance;
  return instance;
}

DeviceInfo device_info() {
  DeviceInfo info;
  info.name = "emulated device";
  info.major = 9;
  info.multiprocessors = 132;
  info.driver = info.runtime = "none";
  info.emulated = true;
  return info;
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (data_ == nullptr) fail_internal("device memory: out of memory for {} bytes", bytes);
}
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)), data_(std::exchange(other.data_, nullptr)) {}
DeviceMemory::~DeviceMemory() { std::free(data_); }
void DeviceMemory::from_host(const void* source, size_t bytes) const {
  if (bytes > 0) std::memcpy(data_, source, bytes);
}
void DeviceMemory::to_host(void* target, size_t bytes) const {
  if (bytes > 0) std::memcpy(target, data_, bytes);
}
void DeviceMemory::fill(int byte) const {
  if (bytes_ > 0) std::memset(data_, byte, bytes_);
}

void device_copy(void* target, const void* source, size_t bytes, void*) { std::memcpy(target, source, bytes); }

void device_synchronize() {}

std::vector<double> device_times(int warmup, int repeats, const std::function<void(int, void*)>& body) {
  std::vector<double> times;
  for (int i = 0; i < warmup; ++i) body(i, nullptr);
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body(warmup + i, nullptr);
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return times;
}

std::vector<double> device_graph_times(int warmup, int repeats, int inner, const std::function<void(int, void*)>& body) {
  std::vector<double> times = device_times(warmup, repeats * inner, body);
  times.resize(static_cast<size_t>(repeats));
  return times;
}

}  // namespace fw
