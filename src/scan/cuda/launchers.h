// The launchers that the lines of kernels.def name, declared by these lines: each queues a kernel, in a form for the
// call's rule, on the stream. By the arguments that they take:
//   FW_TILES   the chunk form with K up to 128
//   FW_K256    with K of 129 to 256
//   FW_RAW     from the raw tensors; additive_scan(), additive_gradients() and fused_forward() (kernels.h)
// launch.cpp calls them.
#pragma once

#include "scan/cuda/kernels.h"

namespace fw::cuda {

#define FW_RAW(launcher)

#define FW_TILES(launcher) \
  void launcher(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream);
#define FW_K256(launcher) void launcher(const K256PrepareArgs& args, int64_t chunks, void* stream);
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) launch
#include "scan/cuda/kernels.def"
#undef FW_TILES
#undef FW_K256

#define FW_TILES(launcher) void launcher(const ScanForwardArgs& args, ForwardScan kernel, int k_tile, void* stream);
#define FW_K256(launcher) void launcher(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream);
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) launch
#include "scan/cuda/kernels.def"
#undef FW_TILES
#undef FW_K256

#define FW_TILES(launcher) void launcher(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream);
#define FW_K256(launcher) void launcher(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream);
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) launch
#include "scan/cuda/kernels.def"
#undef FW_TILES
#undef FW_K256

#define FW_TILES(launcher) \
  void launcher(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);
#define FW_K256(launcher) void launcher(const GradientArgs& args, int64_t chunks, void* stream);
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) launch
#include "scan/cuda/kernels.def"
#undef FW_TILES
#undef FW_K256

#undef FW_RAW

}  // namespace fw::cuda
