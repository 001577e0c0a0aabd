// The GPU that a call runs on.
#pragma once

#include <cstdint>
#include <string>

namespace fw::cuda {

// Compute capability: 9.0 is that of an H100 or H200.
struct Capability {
  int major = 0, minor = 0;
};
// Code that the library has, by the architecture that it was compiled for; a folder sm90/ has what only that one runs.
// That of sm_80 is there for a driver to translate too, which GPUs newer than Hopper run. A GPU of kNone would fail at
// the first launch.
enum class Arch { kNone, kSm80, kSm90 };
// Bytes of shared memory that a block has on every GPU that runs this code: sm_80 itself has 163 KB, but sm_86, sm_89
// and sm_120 have 99.
inline constexpr int kSm80SharedBytes = 99 * 1024, kSm90SharedBytes = 227 * 1024;
// What a GPU of this capability runs.
Arch arch_of(const Capability& capability);

// What a GPU of this capability is taken for, where FASTWEIGHT_CUDA_ARCH is `wanted` (null: not set). With sm_80 it is
// one of 8.0, so that kernels for other GPUs can be tried and timed on Hopper. Throws DeviceError unless it is sm_80.
Capability limited(const Capability& capability, const char* wanted);

// Of the current device, limited by FASTWEIGHT_CUDA_ARCH. Throws DeviceError (base/error.h) if there is none.
Capability current_capability();
// The same; kNone if there is none.
Arch current_arch();
std::string gpu_name();
// Throws DeviceError, with what is supported, unless there is machine code for the current device.
void require_gpu();

// Makes device `number` the calling thread's current one, and what was current again at its end; -1: nothing. Throws
// DeviceError naming the number if there is no such device.
class DeviceScope {
 public:
  explicit DeviceScope(int number);
  ~DeviceScope();  // NOLINT(performance-trivially-destructible): without CUDA there is nothing to do
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;  // -1: nothing was changed
};

// Multiprocessors of the current device; where there is none to ask, and in the emulation, those of an H100 or H200
// (SXM), so that a plan can be made anywhere.
inline constexpr int kUsualSmCount = 132;
int sm_count();
// For kernels whose blocks stay and take turns: sm_count(), but in the emulation two, so that small problems have
// several work tiles.
int64_t persistent_ctas();

}  // namespace fw::cuda
