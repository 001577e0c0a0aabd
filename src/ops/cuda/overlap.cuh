// Kernels over the rows of a pass that are short when the pass is a decoded token's. They begin before the one before
// them is over (launch.h), since most of such a pass is the way from one kernel to the next. Over many rows they begin
// after it, as its last blocks want the SMs for themselves. A kernel that is launched so calls follow() before it
// touches anything that kernels of the pass have made.
#pragma once

#include <utility>

#include "gpu/launch.h"
#include "gpu/ptx.cuh"

namespace fw::cuda {

inline constexpr int64_t kOverlappedRows = 64;

FW_DEVICE void follow() {
  grid_dependency_wait();
  grid_dependency_launch();
}

template <class... P, class... A>
void launch_following(int64_t rows, void (*kernel)(P...), Dim3 grid, unsigned threads, size_t shared_bytes,
                      void* stream, A&&... arguments) {
  if (rows <= kOverlappedRows) {
    launch_overlapped(kernel, grid, threads, shared_bytes, stream, std::forward<A>(arguments)...);
  } else {
    launch(kernel, grid, threads, shared_bytes, stream, std::forward<A>(arguments)...);
  }
}

}  // namespace fw::cuda
