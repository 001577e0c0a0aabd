// Device memory of tests: with FW_CUDA_EMULATION the host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "scan/cuda/launch.h"

namespace fw::cuda {

#ifdef FW_CUDA_EMULATION
inline void* device_allocate(size_t bytes) { return std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024); }
inline void device_free(void* p) { std::free(p); }
inline void device_copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
inline void device_wait() {}
#else
inline void* device_allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc");
  return p;
}
inline void device_free(void* p) { cudaFree(p); }
inline void device_copy(void* to, const void* from, size_t bytes) { check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy"); }
inline void device_wait() { check(cudaDeviceSynchronize(), "a kernel"); }
#endif

// Plain numbers on the device, copied from and to the host.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()), data_(static_cast<T*>(device_allocate(size_ * sizeof(T)))) {
    device_copy(data_, host.data(), size_ * sizeof(T));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { device_free(data_); }
  T* data() { return data_; }
  std::vector<T> host() const {
    device_wait();
    std::vector<T> copy(size_);
    device_copy(copy.data(), data_, size_ * sizeof(T));
    return copy;
  }

 private:
  size_t size_;
  T* data_;
};

}  // namespace fw::cuda
