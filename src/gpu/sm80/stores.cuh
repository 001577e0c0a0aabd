// How tiles leave a block's registers and shared memory, on any GPU from sm_80 on: with stmatrix and bulk copies on
// Hopper, else word by word.
#pragma once

#include "gpu/sm90/ptx.cuh"

namespace fw::cuda {

// Four 8x8 matrices from registers to shared memory, addresses and layout as in ldmatrix: without stmatrix ...
template <bool kTransposed>
FW_DEVICE void store_matrix_words(uint32_t address, const uint32_t (&r)[4]) {
  const int row = static_cast<int>(lane_index()) / 4;
  const uint32_t column = 4 * (lane_index() % 4);
  FW_UNROLL
  for (int i = 0; i < 4; ++i)
    store_shared(shuffle(address, 8 * i + row) + column, kTransposed ? transpose_matrix(r[i]) : r[i]);
}
// ... and with it where the GPU has it.
template <bool kTransposed>
FW_DEVICE void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  if (is_hopper()) {
#if FW_HOPPER
    if constexpr (kTransposed) {
      stmatrix_x4_trans(address, r);
    } else {
      stmatrix_x4(address, r);
    }
#endif
  } else {
    store_matrix_words<kTransposed>(address, r);
  }
}

// To device memory, by all threads of the block, which have written what leaves. stores(copy) calls copy(to, from,
// bytes) for each piece; addresses and sizes are multiples of 16. Then end_stores(), and a barrier of the block, before
// the shared memory is written again.
template <class Stores>
FW_DEVICE void begin_stores(Stores&& stores) {
  if (is_hopper()) {
#if FW_HOPPER
    fence_async_shared();
    sync_threads();
    if (thread_index() == 0) {
      stores([](void* to, const void* from, uint32_t bytes) { bulk_store(to, from, bytes); });
      bulk_commit();
    }
#endif
  } else {
    sync_threads();
    stores([](void* to, const void* from, uint32_t bytes) {
      for (uint32_t at = 16 * thread_index(); at < bytes; at += 16 * block_size())
        *reinterpret_cast<uint4*>(static_cast<char*>(to) + at) =
            *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + at);
    });
  }
}
FW_DEVICE void end_stores() {
#if FW_HOPPER
  if (is_hopper() && thread_index() == 0) bulk_wait_read<0>();
#endif
}
template <class Stores>
FW_DEVICE void store_block(Stores&& stores) {
  begin_stores(stores);
  end_stores();
}

}  // namespace fw::cuda
