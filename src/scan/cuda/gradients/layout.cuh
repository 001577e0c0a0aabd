// What the gradient kernels' phases work on: shared memory by offsets that a shape gives, and the thread.
#pragma once

#include "gpu/sw128.cuh"
#include "scan/cuda/common/front/rows.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

// What a thread knows in the products. The warps lie over a product [64 rows, kTileK] as 4 x kGroups tiles of 16 rows x
// 32 columns.
template <class Shape>
struct GradientChunk {
  const GradientArgs& args;
  char* memory;
  uint32_t base;
  int thread, lane, warp;

  FW_DEVICE explicit GradientChunk(const GradientArgs& a) : args(a) {
    memory = shared_memory();
    base = shared_address(memory);
    thread = static_cast<int>(thread_index());
    lane = static_cast<int>(lane_index());
    warp = shuffle(static_cast<int>(warp_index()), 0);  // so that the compiler knows that a warp agrees on it
  }

  // What follows from the thread's number is made again from here on, and does not sit in registers (or out of them)
  // until then.
  FW_DEVICE void refresh() {
    thread = opaque(thread);
    lane = thread & 31;
    warp = shuffle(thread >> 5, 0);
  }

  // Whether forward has left U = A W, which is R.
  FW_DEVICE bool solved() const { return args.numbers != nullptr && args.numbers->solved != 0; }

  FW_DEVICE float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  FW_DEVICE uint64_t* barrier(int stage) const {
    return reinterpret_cast<uint64_t*>(memory + Shape::kBarriers) + stage;
  }
  FW_DEVICE uint32_t& word(int tile_offset, int row, int column) const {
    return *reinterpret_cast<uint32_t*>(memory + tile_offset + sw128_offset(row, column));
  }
  // The two numbers of a product's fragment at row() + 8 half, columns 8 (atom + j) + 2 (lane % 4) and the next; atom:
  // a multiple of the number of the j.
  FW_DEVICE uint32_t& fragment_at(int tile_offset, int half, int atom, int j) const {
    const int in_row = ((atom & 7) << 4) ^ ((lane & 28) << 2);
    return *reinterpret_cast<uint32_t*>(
        memory + (tile_offset + half * 1024) +
        ((atom >> 3) * kSw128Bytes + row() * 128 + (lane & 3) * 4 + (in_row ^ (j << 4))));
  }
  // At column() + 8 j.
  FW_DEVICE uint32_t& fragment(int tile_offset, int half, int j) const {
    return fragment_at(tile_offset, half, 4 * group(), j);
  }
  // Where the warp's tile of a product lies, and the first of the elements that this lane has in it: rows row, row + 8.
  FW_DEVICE int block_row() const { return warp & 3; }
  FW_DEVICE int group() const { return warp >> 2; }
  FW_DEVICE int row() const { return 16 * block_row() + (lane >> 2); }
  FW_DEVICE int column() const { return 32 * group() + 2 * (lane & 3); }
};

// Log-decays in units of log 2. Below -150 a step leaves nothing of a float: the bound keeps sums finite.
FW_DEVICE float log2_decay(float g) {
  const float x = g * kLog2E;
  return x > -150.0f ? x : -150.0f;
}

}  // namespace fw::cuda
