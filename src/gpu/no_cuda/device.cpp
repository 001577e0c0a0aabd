// A build without CUDA: work for a GPU says so.
#include "gpu/device.h"

#include "base/error.h"

namespace fw::cuda {

DeviceScope::DeviceScope(int) {}
DeviceScope::~DeviceScope() = default;

Arch current_arch() { return Arch::kNone; }

void require_gpu() { throw DeviceError("device: this build of fastweight has no device code (`make gpu` builds it)"); }

}  // namespace fw::cuda
