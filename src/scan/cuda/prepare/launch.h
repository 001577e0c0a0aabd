// How the kernels of prepare that take gates of one scalar per head from memory are launched.
#pragma once

#include "gpu/launch.h"
#include "scan/cuda/common/front/chunk.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

// After gate_values() it begins alongside that, with the rows of q and k, and waits (grid_dependency_wait) before it
// reads gates or writes to memory.
template <class... P, class... A>
void launch_prepare(void (*kernel)(PrepareArgs, P...), Dim3 grid, std::size_t shared_bytes, void* stream,
                    const PrepareArgs& args, A&&... more) {
  if (args.after_gate_kernel) {
    launch_overlapped(kernel, grid, kPrepareThreads, shared_bytes, stream, args, static_cast<A&&>(more)...);
  } else {
    launch(kernel, grid, kPrepareThreads, shared_bytes, stream, args, static_cast<A&&>(more)...);
  }
}

}  // namespace fw::cuda
