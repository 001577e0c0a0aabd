// Numbers of the host in device memory, and zeros: through kernel parameters, so that nothing waits and a graph may
// hold it.
#pragma once

#include <cstdint>

namespace fw::cuda {

// Copies `count` numbers of the host.
void upload(const int32_t* values, int64_t count, int32_t* device, void* stream);
// Zeros.
void clear(uint32_t* device, int64_t count, void* stream);

}  // namespace fw::cuda
