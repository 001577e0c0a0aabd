// The device that a call runs on.
#pragma once

#include <cstdint>
#include <string>

namespace fw::cuda {

// Throws DeviceError (base/error.h) unless the current device can run the plan's kernels; form chunk or token.
void require_device(bool chunk_form);
// Why a device of compute capability major.minor cannot run them, with what it is and what is supported; empty if it
// can. The library has machine code and nothing that a driver could translate, so what is not listed here would fail at
// the first launch.
std::string unsupported(const std::string& name, int major, int minor, bool chunk_form);

// Whether the current device runs kernels on warp-group instructions.
bool has_warp_groups();

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
// For kernels whose blocks stay and take turns: SMs(), but in the emulation two, so that small problems have several
// work tiles.
int64_t persistent_ctas();

}  // namespace fw::cuda
