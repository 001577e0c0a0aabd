#include "scan/cuda/call/device.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#if defined(FW_CUDA_EMULATION)
#include "emulation/gpu.h"
#else
#include <array>
#include <atomic>
#include <mutex>

#include "scan/cuda/call/launch.h"
#endif

namespace fw::cuda {

std::string unsupported(const std::string& name, int major, int minor, bool chunk_form) {
  const bool hopper = major == 9 && minor == 0, ampere = major == 8;  // of sm_90a and sm_80 (cmake/FastweightCuda.cmake)
  if (hopper || (ampere && !chunk_form)) return {};
  const std::string what = fmt::format("device: {}, of compute capability {}.{},", name, major, minor);
  if (ampere) return fmt::format("{} has no chunk form: expected 9.0 (H100, H200, GH200), or form FW_FORM_TOKEN, which runs on 8.0 to 8.9 too", what);
  return fmt::format("{} is not supported: expected 9.0 (H100, H200, GH200), or 8.0 to 8.9 for the token form alone", what);
}

#if defined(FW_CUDA_EMULATION)

void require_device(bool chunk_form) {
  const std::string why = unsupported(emulation::gpu.name, emulation::gpu.major, emulation::gpu.minor, chunk_form);
  if (!why.empty()) throw DeviceError(why);
}
bool has_warp_groups() { return emulation::gpu.major == 9; }
DeviceScope::DeviceScope(int number) {
  if (number > 0) throw DeviceError(fmt::format("descriptor: device_number: expected at most 0 (there is one GPU, the emulated one), got {}", number));
}
DeviceScope::~DeviceScope() = default;
int multiprocessors() { return emulation::gpu.multiprocessors; }
int64_t turning_processors() { return 2; }

#else

void require_device(bool chunk_form) {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) {
    cudaGetLastError();  // or the next call's check would find it
    throw DeviceError(fmt::format("device: expected an NVIDIA GPU, found none ({})", cudaGetErrorString(status)));
  }
  if (unsupported("", major, minor, chunk_form).empty()) return;
  cudaDeviceProp properties{};  // asked for here alone: it takes long
  const bool named = cudaGetDeviceProperties(&properties, device) == cudaSuccess;
  throw DeviceError(unsupported(named ? properties.name : "the GPU", major, minor, chunk_form));
}

bool has_warp_groups() {
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) return major == 9;
  cudaGetLastError();  // or the next call's check would find it
  return false;
}

DeviceScope::DeviceScope(int number) {
  if (number < 0) return;
  int current = 0;
  cudaError_t status = cudaGetDevice(&current);
  if (status == cudaSuccess && current == number) return;
  if (status == cudaSuccess) status = cudaSetDevice(number);
  if (status != cudaSuccess) {
    cudaGetLastError();  // or the next call's check would find it
    throw DeviceError(fmt::format("descriptor: device_number: expected -1 or the number of an NVIDIA GPU, got {} ({})", number, cudaGetErrorString(status)));
  }
  before_ = current;
}
DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

namespace launch_detail {

bool may_overlap() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  return major >= 9;
}

void allow_shared(const void* kernel, std::size_t bytes, bool again) {
  // Open addressing, never emptied; read without the lock. Entries grow: what one thread allows none takes back. Where it is full CUDA is asked each time.
  struct Entry {
    std::atomic<std::uintptr_t> key{0};  // a kernel on a device
    std::atomic<std::size_t> bytes{0};
  };
  constexpr std::size_t kEntries = 4096, kProbes = 64;
  static std::array<Entry, kEntries> entries;
  static std::mutex mutex;
  int device = 0;
  check(cudaGetDevice(&device), "device");
  const std::uintptr_t key = (reinterpret_cast<std::uintptr_t>(kernel) << 6) + static_cast<std::uintptr_t>(device) + 1;
  const auto find = [&]() -> Entry* {
    const std::size_t hash = (key * 0x9E3779B97F4A7C15U) >> 40;
    for (std::size_t i = 0; i < kProbes; ++i) {
      Entry& entry = entries[(hash + i) % kEntries];
      const std::uintptr_t there = entry.key.load(std::memory_order_acquire);
      if (there == key || there == 0) return &entry;
    }
    return nullptr;
  };
  const auto allowed = [&](const Entry* entry) {
    return entry != nullptr && entry->key.load(std::memory_order_acquire) == key && entry->bytes.load(std::memory_order_acquire) >= bytes;
  };
  if (!again && allowed(find())) return;
  const std::lock_guard<std::mutex> lock(mutex);
  Entry* const entry = find();
  if (!again && allowed(entry)) return;
  const bool known = entry != nullptr && entry->key.load(std::memory_order_relaxed) == key;
  const std::size_t most = known ? std::max(bytes, entry->bytes.load(std::memory_order_relaxed)) : bytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)), "dynamic shared memory of a kernel");
  if (entry == nullptr) return;
  entry->bytes.store(most, std::memory_order_release);
  entry->key.store(key, std::memory_order_release);
}

}  // namespace launch_detail

int multiprocessors() {
  int device = 0, count = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) return count;
  cudaGetLastError();  // or the next call's check would find it
  return kUsualMultiprocessors;
}
int64_t turning_processors() { return multiprocessors(); }

#endif

}  // namespace fw::cuda
