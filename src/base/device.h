// Memory and time of the CUDA device, for programs that call the C header with device pointers: tests, selftest, bench. One of
// device/cuda.cpp (a build with CUDA), device/none.cpp (without: each call throws DeviceError) and device/emulated.cpp, where device
// memory is host memory, is linked.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fw {

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int multiprocessors = 0;
  std::string driver, runtime;  // versions, "13.0"
  bool emulated = false;
};

// The calling thread's device. Throws DeviceError saying why there is none.
DeviceInfo device_info();

// Bytes of device memory.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  DeviceMemory(DeviceMemory&& other) noexcept;
  ~DeviceMemory();
  void* data() const { return data_; }
  size_t size() const { return bytes_; }
  // Both wait for all work on the device.
  void from_host(const void* source, size_t bytes) const;
  void to_host(void* target, size_t bytes) const;
  void fill(int byte) const;

 private:
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Queues a copy within device memory.
void device_copy(void* target, const void* source, size_t bytes, void* stream);

// Waits for all work on the device; throws Error(kInternal) if any of it failed.
void device_synchronize();

// Milliseconds on the device of each call of body(i) on the default stream, i < repeats, by events; after `warmup` calls
// that are not timed. With graph: each timed call is a replay of a captured graph of `inner` calls, and the time is divided by it.
std::vector<double> device_times(int warmup, int repeats, const std::function<void(int, void* stream)>& body);
std::vector<double> device_graph_times(int warmup, int repeats, int inner, const std::function<void(int, void* stream)>& body);

}  // namespace fw
