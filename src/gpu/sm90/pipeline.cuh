// Rings of buffers in shared memory between warps that fill them (producers) and warps that empty them (consumers).
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "gpu/sw128.h"

namespace fw::cuda {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // of a block

// The index in a ring of buffers and the parity of its round.
template <int kDepth>
struct Ring {
  int slot = 0, parity = 0;
  FW_DEVICE void next() {
    if (++slot == kDepth) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Buffers of one kind on their way from those that fill them to those that empty them.
template <int kDepth>
struct RingBarriers {
  uint64_t full[kDepth], empty[kDepth];
  // How many threads say so.
  FW_DEVICE void init(int fillers, int emptiers) {
    for (int i = 0; i < kDepth; ++i) {
      mbarrier_init(full + i, fillers);
      mbarrier_init(empty + i, emptiers);
    }
  }
  FW_DEVICE void wait_full(const Ring<kDepth>& ring) { mbarrier_wait(full + ring.slot, ring.parity); }
  FW_DEVICE void wait_empty(const Ring<kDepth>& ring) { mbarrier_wait(empty + ring.slot, ring.parity ^ 1); }
  // By each of the threads, for itself: racecheck does not see that one lane's arrival after sync_warp() is for what
  // the others did.
  FW_DEVICE void put_full(const Ring<kDepth>& ring) { mbarrier_arrive(full + ring.slot); }
  FW_DEVICE void put_empty(const Ring<kDepth>& ring) { mbarrier_arrive(empty + ring.slot); }
};

// ---- From a buffer to global memory: by one thread

// By one thread, when the buffer is full: copies it away; the buffer is empty when this returns.
FW_DEVICE void drain_bulk(uint16_t* to, const char* from, uint32_t bytes, uint64_t* empty) {
  bulk_store(to, from, bytes);
  bulk_commit();
  bulk_wait_read<0>();
  mbarrier_arrive(empty);
}
// By the same thread: of what it has drained, all but the last `kLeft` are in memory. One more of those for whoever
// counts.
template <int kLeft>
FW_DEVICE void count_drained(uint32_t* counter) {
  bulk_wait<kLeft>();
  fence_async_global();
  release_add_one(counter);
}

}  // namespace fw::cuda
