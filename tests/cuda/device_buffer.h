// An array that a kernel can read and write, for tests that run on a GPU and in the emulation.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gpu/launch.h"

#ifdef FW_CUDA_EMULATION
#include "emulation/gpu.h"
#include "emulation/memory.h"
#endif

namespace fw::cuda {

// Exit status of a program whose tests could not run (ctest lists it as skipped).
inline constexpr int kNotRun = 77;

// Whether the kernels can run here; says so if not.
inline bool hopper() {
#ifdef FW_CUDA_EMULATION
  return true;
#else
  int major = 0;
  const bool found = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
  if (!found) std::printf("not run: no GPU of compute capability 9.0\n");
  return found;
#endif
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(const std::vector<T>& values) : size_(values.size()) {
#ifdef FW_CUDA_EMULATION
    data_ = static_cast<T*>(emulation::allocate(bytes()));
    const emulation::Open open;
    if (!values.empty()) std::memcpy(static_cast<void*>(data_), values.data(), bytes());
#else
    check(cudaMalloc(&data_, bytes()), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "copy to the device");
#endif
  }
  // Every byte 0xff: what a kernel forgets to write shows.
  explicit DeviceBuffer(std::size_t size) : DeviceBuffer(filled(size)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
#ifdef FW_CUDA_EMULATION
    emulation::finish();
    emulation::release(data_);
#else
    cudaFree(data_);
#endif
  }

  T* data() { return data_; }
  // Waits for the kernels that were launched before.
  std::vector<T> download() const {
    std::vector<T> values(size_);
#ifdef FW_CUDA_EMULATION
    emulation::finish();
    const emulation::Open open;
    if (!values.empty()) std::memcpy(static_cast<void*>(values.data()), data_, bytes());
#else
    check(cudaDeviceSynchronize(), "kernel");
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy from the device");
#endif
    return values;
  }

 private:
  static std::vector<T> filled(std::size_t size) {
    std::vector<T> values(size);
    std::memset(static_cast<void*>(values.data()), 0xff, size * sizeof(T));
    return values;
  }
  std::size_t bytes() const { return size_ * sizeof(T); }

  std::size_t size_;
  T* data_ = nullptr;
};

}  // namespace fw::cuda
