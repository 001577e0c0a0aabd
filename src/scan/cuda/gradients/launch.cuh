// How the gradient kernels are launched: how many blocks take turns, and alongside a scan in which order.
#pragma once

#include <algorithm>
#include <bit>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

inline unsigned pieces_of(const GradientArgs& args) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  return (is_vec16(x.in.v, x.V) ? kVec16V : 0u) | (is_vec16(args.d_o, x.V) ? kVec16DOut : 0u) |
         (is_vec16(d.v, x.V) ? kVec16DV : 0u) | (is_vec16(d.q, x.K) ? kVec16DQ : 0u) |
         (is_vec16(d.k, x.K) ? kVec16DK : 0u) | (plain_streams(x.rule) ? kPlainRule : 0u) |
         (mixed_streams(x.rule) ? kMixedRule : 0u) | (gain_by_residual(x.rule) ? kGainByResidual : 0u) |
         (is_vec16(x.in.q, x.K) && is_vec16(x.in.k, x.K) ? kVec16Keys : 0u);
}

// How much longer it takes alongside a scan.
inline constexpr double kBesideScan = 1.05;
// Shape::kTileTime: microseconds that a block takes for a tile with two value blocks (measured on an H200). With
// TilesReady there are two launches. The first has the processors that the scan leaves free, and so many tiles as they
// can do in the scan's time, or a work tile more. The second has the remaining tiles, and begins where there is room.
template <class Shape>
void launch_gradients(void (*kernel)(GradientKernelArgs), unsigned threads, size_t shared_bytes, void* stream,
                      GradientKernelArgs args) {
  if (Shape::kSumsHeads && args.gradients.head_sums != nullptr)
    args.heads_log2 = std::countr_zero(static_cast<unsigned>(args.gradients.problem.group));
  const int64_t run = int64_t{1} << args.heads_log2;  // of tiles that one block takes
  const auto blocks_for = [&](int64_t tiles, int64_t sm_count) {
    return static_cast<unsigned>(std::min(tiles / run, sm_count * Shape::kBlocksPerSm));
  };
  const int64_t tiles = args.tiles, all = persistent_ctas();
  TilesReady& ready = args.gradients.ready;
  if (!Shape::kFollows) ready = {};
  if (ready.made == nullptr) {
    launch(kernel, Dim3{blocks_for(tiles, all)}, threads, shared_bytes, stream, args);
    return;
  }
  const int64_t free = std::max<int64_t>(1, all - ready.scan_blocks),
                value_blocks = (args.gradients.problem.V + kValueBlock - 1) / kValueBlock;
  const double tile_time = Shape::kTileTime * static_cast<double>(1 + value_blocks) / 3;
  const int64_t work_tiles = 1 + static_cast<int64_t>(ready.scan_time / (kBesideScan * tile_time));
  args.last = static_cast<unsigned>(tiles - 1);
  args.tiles = std::min(tiles, (work_tiles + run - 1) / run * run * free * Shape::kBlocksPerSm);
  const int64_t remaining = tiles - args.tiles;
  args.more = remaining > 0;
  launch_overlapped(kernel, Dim3{blocks_for(args.tiles, free)}, threads, shared_bytes, stream, args);
  if (remaining == 0) return;
  args.last -= static_cast<unsigned>(args.tiles);
  args.tiles = remaining;
  args.more = false;
  launch_overlapped(kernel, Dim3{blocks_for(remaining, all)}, threads, shared_bytes, stream, args);
}

}  // namespace fw::cuda
