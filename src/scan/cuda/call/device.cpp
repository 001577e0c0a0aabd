#include "scan/cuda/call/device.h"

#include "base/device/no_gpu.h"
#include "base/error.h"
#if defined(FW_CUDA_EMULATION)
#include "emulation/gpu.h"
#else
#include <cuda_runtime.h>
#endif

namespace fw::cuda {

std::string unsupported(const std::string& name, int major, int minor, bool chunk_form) {
  // of sm_90a and sm_80 (cmake/FastweightCuda.cmake)
  const bool hopper = major == 9 && minor == 0, ampere = major == 8;
  if (hopper || (ampere && !chunk_form)) return {};
  const std::string what = fmt::format("device: {}, of compute capability {}.{},", name, major, minor);
  if (ampere)
    return fmt::format(
        "{} has no chunk form: expected 9.0 (H100, H200, GH200), or form FW_FORM_TOKEN, which runs on 8.0 to 8.9 too",
        what);
  return fmt::format("{} is not supported: expected 9.0 (H100, H200, GH200), or 8.0 to 8.9 for the token form alone",
                     what);
}

#if defined(FW_CUDA_EMULATION)

void require_device(bool chunk_form) {
  const std::string why = unsupported(emulation::gpu.name, emulation::gpu.major, emulation::gpu.minor, chunk_form);
  if (!why.empty()) throw DeviceError(why);
}
bool has_warp_groups() { return emulation::gpu.major == 9; }
DeviceScope::DeviceScope(int number) {
  if (number > 0)
    throw DeviceError(fmt::format(
        "descriptor: device_number: expected at most 0 (there is one GPU, the emulated one), got {}", number));
}
DeviceScope::~DeviceScope() = default;
int sm_count() { return emulation::gpu.sm_count; }
int64_t persistent_ctas() { return 2; }

#else

void require_device(bool chunk_form) {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) {
    cudaGetLastError();  // or the next call's check would find it
    throw DeviceError(why_no_gpu(cudaGetErrorString(status)));
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
    throw DeviceError(fmt::format("descriptor: device_number: expected -1 or the number of an NVIDIA GPU, got {} ({})",
                                  number, cudaGetErrorString(status)));
  }
  before_ = current;
}
DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

int sm_count() {
  int device = 0, count = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) return count;
  cudaGetLastError();  // or the next call's check would find it
  return kUsualSmCount;
}
int64_t persistent_ctas() { return sm_count(); }

#endif

}  // namespace fw::cuda
