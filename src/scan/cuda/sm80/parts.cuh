// What the scans of mma.sync share. A block has four warps, which do everything together: they start the copies of a
// chunk into shared memory (cp.async), hold the state in registers (common/scan/parts.cuh) and store what leaves.
// There is one buffer of each operand. It is loaded again for the next chunk as soon as its last product has read it,
// so copies run beside the other products.
#pragma once

#include "gpu/device.h"
#include "gpu/sm80/products.cuh"
#include "scan/cuda/common/scan/parts.cuh"

namespace fw::cuda {

inline constexpr int kWarpScanThreads = 128;

// By all threads: kBytes from device memory to shared memory, asynchronously, ...
template <int kBytes>
FW_DEVICE void load_bytes(char* to, const void* from) {
  const uint32_t address = shared_address(to);
  const int first = 16 * static_cast<int>(thread_index());
  FW_UNROLL
  for (int at = 0; at < kBytes; at += 16 * kWarpScanThreads) {
    if (kBytes % (16 * kWarpScanThreads) == 0 || at + first < kBytes)
      cp_async_16(address + static_cast<uint32_t>(at + first), static_cast<const char*>(from) + at + first, true);
  }
}
// ... and back.
template <int kBytes>
FW_DEVICE void store_bytes(void* to, const char* from) {
  static_assert(kBytes % (16 * kWarpScanThreads) == 0);
  const int first = 16 * static_cast<int>(thread_index());
  FW_UNROLL
  for (int at = first; at < kBytes + first; at += 16 * kWarpScanThreads)
    *reinterpret_cast<uint4*>(static_cast<char*>(to) + at) = *reinterpret_cast<const uint4*>(from + at);
}

// d times one number: the decay of a chunk that all channels share.
template <int kN>
FW_DEVICE void scale_all(float (&d)[kN], float by) {
  FW_UNROLL
  for (float& x : d) x *= by;
}

}  // namespace fw::cuda
