// Value heads that share a key head as work tiles of one block, one after the other (WorkTile: heads). What dq and dk
// take of each is added up in memory of the block's own, which stays in the L2 cache. The sum leaves with the last
// head. The order of the sum is that of the heads, whatever else runs.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

// Float32 numbers of a thread, in vectors of four: kHeadSums of them, so that a block has 64 rows of dq and of dk.
template <class Shape>
inline constexpr int kHeadSums = 2 * 64 * Shape::kTileK / Shape::kThreads;

// kN numbers from number `first` on become the sum over the heads so far; returns whether that is all of them, and else
// they are for nobody else yet.
template <class Shape, int kN>
FW_DEVICE bool add_heads(const WorkTile<Shape>& c, int work_tile, int first, float (&x)[kN]) {
  static_assert(kN % 4 == 0);
  if (!Shape::kSumsHeads || c.all.heads_log2 == 0) return true;
  const int most = (1 << c.all.heads_log2) - 1, head = work_tile & most;
  float4* const at = reinterpret_cast<float4*>(c.args.head_sums) +
                     (static_cast<int>(block_index_x()) * (kHeadSums<Shape> / 4) + first / 4) * Shape::kThreads +
                     c.thread;
  const auto four = [&](int i) { return make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]); };
  if (head == most) {
    FW_UNROLL
    for (int i = 0; i < kN / 4; ++i) {
      const float4 before = load_past_l1(at + i * Shape::kThreads);
      x[4 * i] += before.x, x[4 * i + 1] += before.y, x[4 * i + 2] += before.z, x[4 * i + 3] += before.w;
    }
    return true;
  }
  FW_UNROLL
  for (int i = 0; i < kN / 4; ++i) {
    if (head == 0) {
      at[i * Shape::kThreads] = four(i);
    } else {
      add_there(at + i * Shape::kThreads, four(i));
    }
  }
  return false;
}

}  // namespace fw::cuda
