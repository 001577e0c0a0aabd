// The phases of kernels.h: each launches the kernel that was chosen, by its line of kernels.def.
#include "base/error.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launchers.h"

namespace fw::cuda {
namespace {

[[noreturn]] void other_arguments(const char* phase, const char* name) {
  fail_internal("{}: expected a kernel that takes these arguments, got {}", phase, name);
}

}  // namespace

// ---- Chunk tiles: K up to 128

#define FW_K256(launcher) other_arguments(__func__, #launcher)
#define FW_RAW(launcher) other_arguments(__func__, #launcher)

#define FW_TILES(launcher) return launcher(args, choice, k_tile, chunks, stream)
void prepare(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream) {
  switch (choice.kernel) {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) \
  case PrepareKernel::id:                                        \
    launch;
#include "scan/cuda/kernels.def"
  }
}
#undef FW_TILES

#define FW_TILES(launcher) return launcher(args, kernel, k_tile, stream)
void scan_forward(const ScanForwardArgs& args, ForwardScan kernel, int k_tile, void* stream) {
  switch (kernel) {
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) \
  case ForwardScan::id:                                       \
    launch;
#include "scan/cuda/kernels.def"
  }
}
void scan_reverse(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream) {
  switch (kernel) {
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) \
  case ReverseScan::id:                                \
    launch;
#include "scan/cuda/kernels.def"
  }
}
#undef FW_TILES

#define FW_TILES(launcher) return launcher(args, kernel, k_tile, chunks, stream)
void gradients(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream) {
  switch (kernel) {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) \
  case GradientKernel::id:                                      \
    launch;
#include "scan/cuda/kernels.def"
  }
}
#undef FW_TILES
#undef FW_K256

// ---- K of 129 to 256

#define FW_TILES(launcher) other_arguments(__func__, #launcher)

#define FW_K256(launcher) return launcher(args, chunks, stream)
void k256_prepare(const K256PrepareArgs& args, PrepareKernel kernel, int64_t chunks, void* stream) {
  const int64_t K = args.problem.K;
  if (K > kMaxTileK || K <= kHalfTileK)
    fail_internal("k256_prepare: expected K from {} to {}, got {}", kHalfTileK + 1, kMaxTileK, K);
  switch (kernel) {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) \
  case PrepareKernel::id:                                        \
    launch;
#include "scan/cuda/kernels.def"
  }
}
void k256_gradients(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream) {
  if (chunks == 0) return;
  if (args.half.numbers == nullptr && args.half.norms == nullptr)
    fail_internal("k256_gradients: expected scales of rows or norms, got neither");
  switch (kernel) {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) \
  case GradientKernel::id:                                      \
    launch;
#include "scan/cuda/kernels.def"
  }
}
#undef FW_K256

#define FW_K256(launcher) return launcher(args, chunk_tiles, stream)
void k256_forward(const ScanForwardArgs& args, ForwardScan kernel, const K256Tiles& chunk_tiles, void* stream) {
  if ((args.states == nullptr) != (args.w == nullptr))
    fail_internal("k256_forward: states and w are saved together or not at all");
  if (args.K > kMaxTileK || args.parts != nullptr || args.maps.data != nullptr ||
      (args.z != nullptr && kernel != ForwardScan::kK256Keys)) {
    fail_internal(
        "k256_forward: expected K at most {} and whole sequences, with raw values unless there are chunk tiles, got K "
        "{}",
        kMaxTileK, args.K);
  }
  switch (kernel) {
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) \
  case ForwardScan::id:                                       \
    launch;
#include "scan/cuda/kernels.def"
  }
}
void k256_reverse(const ScanReverseArgs& args, ReverseScan kernel, const K256Tiles& chunk_tiles, void* stream) {
  if ((args.d_states == nullptr) != (args.v == nullptr))
    fail_internal("k256_reverse: d_states and v are saved together or not at all");
  if (args.K > kMaxTileK || args.parts != nullptr || args.made != nullptr) {
    fail_internal("k256_reverse: expected K at most {} and whole sequences, got K {}", kMaxTileK, args.K);
  }
  switch (kernel) {
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) \
  case ReverseScan::id:                                \
    launch;
#include "scan/cuda/kernels.def"
  }
}

}  // namespace fw::cuda
