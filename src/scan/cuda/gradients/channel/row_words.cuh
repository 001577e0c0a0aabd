// Channel decay: what a thread loads of the rows of a work tile, and what both halves of K above 128 share of them.
#pragma once

#include "scan/cuda/gradients/channel/chunk.cuh"

namespace fw::cuda {

// q, k, the third row and M (or what it is made of) of the row and the two atoms of it that a thread has, a work tile
// ahead.
struct RowWords {
  uint4 q[2], k[2], third[2], before[2];
  float m[2][8];
  float2 squares[2];  // |q|^2 and |k|^2, of shapes with half of the keys
};
template <class Shape>
FW_DEVICE float2 load_squares(const ChannelChunk<Shape>& c, int work_tile, int row) {
  const RowNorms& all = c.args.half.norms[c.tile(work_tile)];
  return make_float2(all.q2[row], all.k2[row]);
}

// What all value columns make, and so both groups of key channels alike.
template <class Shape>
FW_DEVICE float first_half_alone(const ChannelChunk<Shape>& c, float x) {
  if constexpr (Shape::kHalf) return c.args.half.second ? 0.0f : x;
  return x;
}

}  // namespace fw::cuda
