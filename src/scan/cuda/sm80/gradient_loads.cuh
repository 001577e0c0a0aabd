// How blocks of the gradient kernels of mma.sync load what the scans and prepare have left: by all threads, with
// cp.async.
#pragma once

#include "scan/cuda/gradients/row_loads.cuh"
#include "scan/cuda/sm80/parts.cuh"

namespace fw::cuda {

struct WarpGradientTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool has_unscaled_keys = false;  // A, P and the chunk tiles are those of unscaled_keys.cuh
  bool has_half_of_keys = false;   // of k256_gradients() (kernels.h)
};

// A tile as the scans left it, and 64 rows of bf16 from `column` on in pieces of 16 bytes, of which those from `limit`
// on are 0. How often threads take turns is a constant, which the compiler does not find by itself, and a turn is a
// constant further.
template <int kBytes, class Shape>
FW_DEVICE void copy_tile(const WorkTile<Shape>& c, int to, const uint16_t* from) {
  static_assert(kBytes % (16 * Shape::kThreads) == 0);
  const uint32_t at = 16 * static_cast<uint32_t>(c.thread);
  const char* p = reinterpret_cast<const char*>(from) + at;
  FW_UNROLL
  for (int i = 0; i < kBytes; i += 16 * Shape::kThreads)
    cp_async_16(c.base + at + static_cast<uint32_t>(to + i), p + i, true);
}
template <int kColumns, class Shape>
FW_DEVICE void copy_rows(const WorkTile<Shape>& c, const Rows& from, int work_tile, int column, int limit, int to) {
  constexpr unsigned kAtoms = kColumns / 8;
  constexpr int kRows = Shape::kThreads / static_cast<int>(kAtoms);
  static_assert(kRows % 8 == 0);
  const unsigned thread = static_cast<unsigned>(c.thread);
  const int first = static_cast<int>(thread / kAtoms), in_tile = static_cast<int>(thread % kAtoms) * 8;
  const int rows = column + in_tile < limit ? c.rows(work_tile) : 0;
  const char* p = from.data + 2 * (first * from.stride + column + in_tile);
  const uint32_t at = c.base + static_cast<uint32_t>(to) + sw128_offset(first, in_tile);
  FW_UNROLL
  for (int i = 0; i < kChunk / kRows; ++i, p += 2 * kRows * from.stride) {
    const bool valid = first + i * kRows < rows;
    cp_async_16(at + static_cast<uint32_t>(128 * kRows * i), valid ? p : from.data, valid);
  }
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
  if (Shape::kDelta) copy_tile<kSw128Bytes>(c, Shape::kA, pair.a);
  if (!c.args.v_is_dz) copy_tile<kSw128Bytes>(c, Shape::kP, pair.p);
}

// The stage of a block of 64 value columns.
template <class Shape>
FW_DEVICE void load_value_block(const WorkTile<Shape>& c, int work_tile, int block) {
  const GradientArgs& x = c.args;
  const int64_t tile = c.tile(work_tile) * c.blocks + block;
  copy_tile<kSw128Bytes>(c, Shape::kW, x.w + tile * kSw128Elements);
  copy_tile<kSw128Bytes>(c, Shape::kV, x.v + tile * kSw128Elements);
  copy_tile<Shape::kStateBytes>(c, Shape::kState, x.states + tile * Shape::kStateStep);
  copy_tile<Shape::kStateBytes>(c, Shape::kDState, x.d_states + tile * Shape::kStateStep);
  const Rows d_o = c.rows_at(x.d_o, work_tile);
  const int column = block * kValueBlock, V = x.problem.V;
  if (c.pieces(kVec16DOut)) {
    copy_rows<kValueBlock>(c, d_o, work_tile, column, V, Shape::kOut);
  } else {
    load_row_tile<kValueBlock>(c, d_o, false, work_tile, column, V, Shape::kOut);
  }
}

}  // namespace fw::cuda
