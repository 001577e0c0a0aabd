#include "gpu/device.h"

#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "gpu/memory/no_gpu.h"
#if defined(FW_CUDA_EMULATION)
#include "emulation/gpu.h"
#else
#include <cuda_runtime.h>
#endif

namespace fw::cuda {

namespace {

const char* wanted_arch() {
  static const char* const wanted = std::getenv("FASTWEIGHT_CUDA_ARCH");
  return wanted;
}

}  // namespace

#if defined(FW_CUDA_EMULATION)

Capability current_capability() { return limited({emulation::gpu.major, emulation::gpu.minor}, wanted_arch()); }
Arch current_arch() { return arch_of(current_capability()); }
std::string gpu_name() { return emulation::gpu.name; }
DeviceScope::DeviceScope(int number) {
  if (number > 0)
    throw DeviceError(fmt::format(
        "descriptor: device_number: expected at most 0 (there is one GPU, the emulated one), got {}", number));
}
DeviceScope::~DeviceScope() = default;
int sm_count() { return emulation::gpu.sm_count; }
int64_t persistent_ctas() { return 2; }

#else

namespace {

// Of the current device, which `device` is set to.
cudaError_t ask(Capability& capability, int& device) {
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) cudaGetLastError();  // or the next call's check would find it
  return status;
}

}  // namespace

Capability current_capability() {
  Capability capability;
  int device = 0;
  const cudaError_t status = ask(capability, device);
  if (status != cudaSuccess) throw DeviceError(why_no_gpu(cudaGetErrorString(status)));
  return limited(capability, wanted_arch());
}
Arch current_arch() {
  Capability capability;
  int device = 0;
  return ask(capability, device) == cudaSuccess ? arch_of(limited(capability, wanted_arch())) : Arch::kNone;
}
std::string gpu_name() {
  int device = 0;
  cudaDeviceProp properties{};
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, device);
  if (status == cudaSuccess) return properties.name;
  cudaGetLastError();  // or the next call's check would find it
  return "the GPU";
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

void require_gpu() {
  const Capability capability = current_capability();
  if (arch_of(capability) != Arch::kNone) return;
  throw DeviceError(fmt::format("device: {}, of compute capability {}.{}, is not supported: expected 8.0 or newer",
                                gpu_name(), capability.major, capability.minor));
}

Capability limited(const Capability& capability, const char* wanted) {
  if (wanted == nullptr) return capability;
  if (std::string_view(wanted) != "sm_80")
    throw DeviceError(fmt::format("FASTWEIGHT_CUDA_ARCH: expected sm_80, or not to be set, got '{}'", wanted));
  return arch_of(capability) == Arch::kNone ? capability : Capability{8, 0};
}

Arch arch_of(const Capability& capability) {
  if (capability.major == 9 && capability.minor == 0) return Arch::kSm90;  // sm_90a runs nowhere else
  return capability.major >= 8 ? Arch::kSm80 : Arch::kNone;  // newer ones by the driver's translation of compute_80
}

}  // namespace fw::cuda
