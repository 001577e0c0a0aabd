#include "scan/cuda/call/device.h"

#include "base/error.h"

#if !defined(FW_CUDA_EMULATION)
#include <cuda_runtime.h>
#endif

namespace fw::cuda {

#if defined(FW_CUDA_EMULATION)
void require_device(bool) {}
int multiprocessors() { return kUsualMultiprocessors; }
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
  if (chunk_form && major != 9) {
    throw DeviceError(fmt::format(
        "device: the chunk form runs on compute capability 9.0 (H100, H200, GH200), this GPU has {}.{}; form FW_FORM_TOKEN runs from 8.0 on", major, minor));
  }
  if (major < 8) throw DeviceError(fmt::format("device: expected compute capability 8.0 or more, this GPU has {}.{}", major, minor));
}

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
