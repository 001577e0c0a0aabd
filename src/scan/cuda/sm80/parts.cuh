// What the scans of mma.sync share. A block has four warps, with K above 128 eight. They do everything together: they
// start the copies of a chunk into shared memory (cp.async), hold the state in registers (common/scan/parts.cuh) and
// store what leaves. There is one buffer of each operand. It is loaded again for the next chunk as soon as its last
// product has read it, so copies run beside the other products.
#pragma once

#include "gpu/device.h"
#include "gpu/sm80/products.cuh"
#include "scan/cuda/common/scan/parts.cuh"

namespace fw::cuda {

inline constexpr int kWarpScanThreads = 128;

// How a scan's warps share the state. With K above 128 group g of four warps has channels 128 g to 128 g + 127 of all
// 64 values. A product with the state is then a sum of both groups' parts, and group g makes that of tokens 32 g to
// 32 g + 31.
template <int kTileK>
struct ScanGroups {
  static constexpr int kGroups = kTileK > kHalfTileK ? 2 : 1, kThreads = kGroups * kWarpScanThreads;
  static constexpr bool kSplit = kGroups > 1;
  static constexpr int kOwnK = kTileK / kGroups, kOwnBytes = 64 * kOwnK * 2;  // of a tile [64, kTileK]
  static constexpr int kOwnTokens = kChunk / kGroups, kOwnSums = 32 / kGroups;

  int group = 0;
  FW_DEVICE ScanGroups() {
    if constexpr (kSplit) group = shuffle(static_cast<int>(warp_index()) / 4, 0);
  }
  FW_DEVICE int first_channel() const { return group * kOwnK; }
  FW_DEVICE int first_token() const { return group * kOwnTokens; }
  FW_DEVICE uint32_t key_bytes() const { return static_cast<uint32_t>(group * kOwnBytes); }
  FW_DEVICE uint32_t token_bytes() const { return static_cast<uint32_t>(group * kOwnTokens * 128); }
};

// The sums of an accumulator of 64 columns that are the group's own.
template <class Groups>
FW_DEVICE float (&own_sums(float (&d)[32]))[Groups::kOwnSums] {
  return *reinterpret_cast<float(*)[Groups::kOwnSums]>(d);
}

// Of two groups: each leaves what it has of the other's columns in kPartBytes of shared memory, and its own are in
// own_sums(d); after a barrier it adds what the other has left.
inline constexpr int kPartBytes = kChunk * kValueBlock * 4;
FW_DEVICE float4* group_parts(char* parts, int group) {
  return reinterpret_cast<float4*>(parts + group * (kPartBytes / 2)) + (thread_index() & (kWarpScanThreads - 1));
}
FW_DEVICE void leave_part(char* parts, int group, float (&d)[32]) {
  float4* const to = group_parts(parts, 1 - group);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const auto other = [&](int i) { return group == 0 ? d[16 + 4 * j + i] : d[4 * j + i]; };
    to[kWarpScanThreads * j] = make_float4(other(0), other(1), other(2), other(3));
  }
  FW_UNROLL
  for (int i = 0; i < 16; ++i) d[i] = group == 0 ? d[i] : d[16 + i];
}
FW_DEVICE void add_part(char* parts, int group, float (&d)[32]) {
  const float4* const from = group_parts(parts, group);
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float4 x = from[kWarpScanThreads * j];
    d[4 * j] += x.x, d[4 * j + 1] += x.y, d[4 * j + 2] += x.z, d[4 * j + 3] += x.w;
  }
}

// By all threads: kBytes from device memory to shared memory, asynchronously, ...
template <int kBytes, int kThreads = kWarpScanThreads>
FW_DEVICE void load_bytes(char* to, const void* from) {
  const uint32_t address = shared_address(to);
  const int first = 16 * static_cast<int>(thread_index());
  FW_UNROLL
  for (int at = 0; at < kBytes; at += 16 * kThreads) {
    if (kBytes % (16 * kThreads) == 0 || at + first < kBytes)
      cp_async_16(address + static_cast<uint32_t>(at + first), static_cast<const char*>(from) + at + first, true);
  }
}
// ... and back.
template <int kBytes, int kThreads = kWarpScanThreads>
FW_DEVICE void store_bytes(void* to, const char* from) {
  static_assert(kBytes % (16 * kThreads) == 0);
  const int first = 16 * static_cast<int>(thread_index());
  FW_UNROLL
  for (int at = first; at < kBytes + first; at += 16 * kThreads)
    *reinterpret_cast<uint4*>(static_cast<char*>(to) + at) = *reinterpret_cast<const uint4*>(from + at);
}

// d times one number: the decay of a chunk that all channels share.
template <int kN>
FW_DEVICE void scale_all(float (&d)[kN], float by) {
  FW_UNROLL
  for (float& x : d) x *= by;
}

}  // namespace fw::cuda
