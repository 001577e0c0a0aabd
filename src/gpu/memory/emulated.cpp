// The device of a build whose kernels run in the emulation (tests/emulation): its memory is there while a kernel or a
// copy runs, else the host faults.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/device.h"
#include "base/error.h"
#include "base/gpus.h"
#include "emulation/gpu.h"
#include "emulation/memory.h"

namespace fw {
namespace {

namespace emulation = cuda::emulation;

// What has been launched is over before the host looks at memory, changes it or gives it away.
void move(void* to, const void* from, size_t bytes) {
  emulation::finish();
  const emulation::Open open;
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void set(void* to, int byte, size_t bytes) {
  emulation::finish();
  const emulation::Open open;
  if (bytes > 0) std::memset(to, byte, bytes);
}

class EmulatedDevice final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CUDA; }
  size_t alignment() const override { return 256; }
  bool host_memory() const override { return false; }

  void* allocate(size_t bytes) override { return emulation::allocate(bytes); }
  void release(void* memory) noexcept override {
    emulation::finish();
    emulation::release(memory);
  }
  void from_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void to_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { move(to, from, bytes); }
  void fill(void* to, int byte, size_t bytes) override { set(to, byte, bytes); }
  void synchronise() override { emulation::finish(); }
};

}  // namespace

Device& cuda_device() {
  static EmulatedDevice instance;
  return instance;
}

namespace {

// FW_EMULATION_GPUS: how many GPUs the machine seems to have; without it every process has one of its own.
int gpus_of_machine() {
  const char* const text = std::getenv("FW_EMULATION_GPUS");
  return text != nullptr ? std::max(1, std::atoi(text)) : 0;
}
int selected = 0;

}  // namespace

void select_cuda_device(int number) {
  const int count = cuda_device_count();
  if (number >= count)
    fail_usage("device: expected cuda:0 to cuda:{}, the emulated device, got cuda:{}", count - 1, number);
  selected = number;
}

int cuda_device_count() { return std::max(1, gpus_of_machine()); }
std::string cuda_device_address() {
  return gpus_of_machine() > 0 ? fmt::format("emulated {}", selected)
                               : fmt::format("emulated by process {}", ::getpid());
}
std::shared_ptr<std::byte> cuda_staging(size_t bytes) {
  return {new std::byte[bytes], [](const std::byte* given) { delete[] given; }};
}

std::string device_code() { return "kernels run on the CPU (the tests' emulation)"; }

DeviceInfo device_info() {
  DeviceInfo info;
  info.name = "emulated device";
  info.major = cuda::emulation::gpu.major, info.minor = cuda::emulation::gpu.minor;
  info.sm_count = 132;
  info.driver = info.runtime = "none";
  info.emulated = true;
  return info;
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes), data_(bytes > 0 ? emulation::allocate(bytes) : nullptr) {}
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, 0)), data_(std::exchange(other.data_, nullptr)) {}
DeviceMemory::~DeviceMemory() {
  emulation::finish();
  emulation::release(data_);
}
void DeviceMemory::from_host(const void* source, size_t bytes) const { move(data_, source, bytes); }
void DeviceMemory::to_host(void* target, size_t bytes) const { move(target, data_, bytes); }
void DeviceMemory::fill(int byte) const { set(data_, byte, bytes_); }

void device_copy(void* target, const void* source, size_t bytes, void*) { move(target, source, bytes); }

void device_synchronize() { emulation::finish(); }

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

std::vector<double> device_graph_times(int warmup, int repeats, int inner,
                                       const std::function<void(int, void*)>& body) {
  std::vector<double> times = device_times(warmup, repeats * inner, body);
  times.resize(static_cast<size_t>(repeats));
  return times;
}

}  // namespace fw
