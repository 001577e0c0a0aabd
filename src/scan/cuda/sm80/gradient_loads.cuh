// How blocks of the gradient kernels of mma.sync load what the scans and prepare have left: by all threads, with
// cp.async.
#pragma once

#include "scan/cuda/gradients/row_loads.cuh"
#include "scan/cuda/sm80/parts.cuh"

namespace fw::cuda {

struct WarpGradientTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
};

// Elements of a tile as the scans left it.
template <class Shape>
FW_DEVICE void load_tile(const WorkTile<Shape>& c, int to, const uint16_t* from, int elements) {
  for (int i = 8 * c.thread; i < elements; i += 8 * Shape::kThreads)
    cp_async_16(c.base + static_cast<uint32_t>(to + 2 * i), from + i, true);
}
FW_DEVICE void finish_loads() {
  cp_async_commit();
  cp_async_wait<0>();
  sync_threads();
}

// A, and P unless the scan has left dZ.
template <class Shape>
FW_DEVICE void load_intra_chunk(const WorkTile<Shape>& c, int work_tile) {
  const IntraChunk& pair = c.args.pairs[c.tile(work_tile)];
  if (Shape::kDelta) load_tile(c, Shape::kA, pair.a, kSw128Elements);
  if (!c.args.v_is_dz) load_tile(c, Shape::kP, pair.p, kSw128Elements);
}

// The stage of a block of 64 value columns.
template <class Shape>
FW_DEVICE void load_value_block(const WorkTile<Shape>& c, int work_tile, int block) {
  const GradientArgs& x = c.args;
  const int64_t tile = c.tile(work_tile) * c.blocks + block;
  load_tile(c, Shape::kW, x.w + tile * kSw128Elements, kSw128Elements);
  load_tile(c, Shape::kV, x.v + tile * kSw128Elements, kSw128Elements);
  load_tile(c, Shape::kState, x.states + tile * (64 * Shape::kTileK), 64 * Shape::kTileK);
  load_tile(c, Shape::kDState, x.d_states + tile * (64 * Shape::kTileK), 64 * Shape::kTileK);
  load_row_tile<kValueBlock>(c, c.rows_at(x.d_o, work_tile), c.pieces(kVec16DOut), work_tile, block * kValueBlock,
                             x.problem.V, Shape::kOut);
}

}  // namespace fw::cuda
