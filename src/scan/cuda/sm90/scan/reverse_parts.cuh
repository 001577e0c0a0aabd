// What the reverse scans of chunk tiles and of raw rows share: where a block begins, and how what it makes leaves.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/sm90/scan/decay_cutoff.cuh"

namespace fw::cuda {

// By all threads: the chunks that the block goes through, from the last of them on; below 0: it has nothing to do.
template <bool kSave>
FW_DEVICE int reverse_chunks(const ScanReverseArgs& args, const ScanCoord& coord, char* shared) {
  if (args.parts == nullptr) return coord.chunks;
  if ((args.parts[coord.n] & 1) == 0) return -1;
  if constexpr (!kSave) {
    const int fading = fading_chunks<true>(args.uses_decay_cutoff, args.sequences, coord, shared);
    if (fading > 0) return fading;
  }
  return coord.chunks;
}

// By warps 2 and 3: D^T of each chunk goes from d (kMatrix bytes a buffer), V or dZ from v (a SW128 tile a buffer) to
// memory. Where the gradients run alongside, what is there is counted.
template <bool kSave, int kMatrix, int kBuffers>
FW_DEVICE void drain_reverse(const ScanReverseArgs& args, const ScanCoord& coord, int value_blocks, const char* d,
                             RingBarriers<kBuffers>& d_barriers, const char* v, RingBarriers<kBuffers>& v_barriers) {
  const bool drains_d = thread_index() == kStoreThread, drains_v = thread_index() == kStoreThread + 32;
  if (!kSave || (!drains_d && !drains_v)) return;
  uint32_t* const made = args.made != nullptr ? args.made + coord.first_tile : nullptr;
  Ring<kBuffers> ring;
  for (int c = coord.chunks - 1; c >= 0; --c, ring.next()) {
    const int64_t tile = (coord.first_tile + static_cast<int64_t>(c) * args.HV) * value_blocks + coord.value_block;
    if (drains_d) {
      d_barriers.wait_full(ring);
      drain_bulk(args.d_states + tile * (kMatrix / 2), d + ring.slot * kMatrix, kMatrix, d_barriers.empty + ring.slot);
    } else {
      v_barriers.wait_full(ring);
      drain_bulk(args.v + tile * kSw128Elements, v + ring.slot * kSw128Bytes, kSw128Bytes,
                 v_barriers.empty + ring.slot);
    }
    if (made != nullptr && c + 1 < coord.chunks) count_drained<1>(made + static_cast<int64_t>(c + 1) * args.HV);
  }
  if (made != nullptr && coord.chunks > 0) count_drained<0>(made);
  bulk_wait<0>();
}

}  // namespace fw::cuda
