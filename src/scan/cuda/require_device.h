// Which GPUs run which form of the recurrence.
#pragma once

#include <string>

#include "gpu/device.h"

namespace fw::cuda {

// Throws DeviceError (base/error.h) unless the current device runs the chunk (or the token) form.
void require_device(bool chunk_form);
// Why a GPU of this name and capability does not run it, with what it is and what is supported; empty if it does.
std::string unsupported(const std::string& name, const Capability& capability, bool chunk_form);

}  // namespace fw::cuda
