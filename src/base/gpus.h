// The GPUs that a process sees and the host's memory beside them: for what runs on several. Of device/*.cpp, as the
// CUDA device of device.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/device.h"

namespace fw {

// How many there are to select from (select_cuda_device). Throws DeviceError saying why there is none.
int cuda_device_count();
// What tells the calling thread's device from every other one of this machine, whatever number a process has it under:
// its PCI address.
std::string cuda_device_address();

// Memory of the host that copies to and from the CUDA device take fastest: page-locked. from_host() of it may return
// before it has been read: synchronise() comes before it is written again. bytes > 0. Throws std::bad_alloc.
std::shared_ptr<std::byte> cuda_staging(size_t bytes);

}  // namespace fw
