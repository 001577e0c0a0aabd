// Host side of a kernel: launch(kernel, grid, threads, shared_bytes, stream, arguments...). Kernels take their
// arguments by value. On a GPU it queues the kernel on the stream (a cudaStream_t, null for the default) and throws
// fw::Error when that is refused; a fault while it runs shows at the next synchronization. In the emulation
// (FW_CUDA_EMULATION) the kernel has run when it returns. A grid with a zero is no launch.
//
// Kernels one after the other (launch_overlapped, on Hopper). One that calls grid_dependency_launch() lets the next one
// on the stream begin once all its blocks have called it or are over. That one calls grid_dependency_wait() before it
// touches what this one makes or reads, and this returns when this one is over and its writes are seen. What the next
// one reads before its wait must have been there before this one began. The rule: wait, then launch. Then whatever was
// on the stream before this kernel is over when the next one begins, and the next one may read it at once: inputs, and
// what kernels further in front have left. A kernel that launches first says so (grid_dependency_launch_first) and
// breaks that chain: its next one may read ahead only what this kernel itself could, and its launch says what that is.
// The emulation ends the program where a kernel of the first kind launches before it waits, and with FW_EMULATION_EARLY
// starts blocks before the kernel in front has run.
#pragma once

#include <cstddef>

#ifdef FW_CUDA_EMULATION
#include "emulation/emulation.h"
#else
#include <cuda_runtime.h>

#include <string>

#ifndef FMT_USE_CONSTEXPR
#define FMT_USE_CONSTEXPR 1  // fmt 9 believes that nvcc has none, and then is not valid C++20
#endif
#endif
#include "base/error.h"
#include "gpu/device.h"

namespace fw::cuda {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

#ifdef FW_CUDA_EMULATION

namespace launch_detail {

template <class... P>
void launch(void (*kernel)(P...), Dim3 grid, unsigned cluster, unsigned threads, std::size_t shared_bytes,
            void* /*stream*/, bool overlapped, P... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  emulation::run_grid(
      {grid.x, grid.y, grid.z, threads, shared_bytes, reinterpret_cast<const void*>(kernel), overlapped, cluster},
      [=] { kernel(arguments...); });
}

}  // namespace launch_detail

#else

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that the next launch does not report it again
  throw Error(ErrorKind::kInternal, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

namespace launch_detail {

// Whether the current GPU can start a kernel before the one before it is over, and runs code that waits for that:
// Hopper. Newer ones run the code of sm_80, which does not wait.
inline bool may_overlap() { return current_arch() == Arch::kSm90; }

template <class... P>
void launch(void (*kernel)(P...), Dim3 grid, unsigned cluster, unsigned threads, std::size_t shared_bytes, void* stream,
            bool overlapped, P... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (overlapped) overlapped = may_overlap();
  constexpr std::size_t kSharedWithoutAsking = 48 * 1024;
  if (shared_bytes > kSharedWithoutAsking)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "dynamic shared memory of a kernel");
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (overlapped) {
    cudaLaunchAttribute& attribute = attributes[count++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[count++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(threads, 1, 1);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = count > 0 ? attributes : nullptr;
  config.numAttrs = count;
  void* addresses[] = {static_cast<void*>(&arguments)..., nullptr};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), addresses), "launch of a kernel");
}

}  // namespace launch_detail

#endif

template <class... P, class... A>
void launch(void (*kernel)(P...), Dim3 grid, unsigned threads, std::size_t shared_bytes, void* stream,
            A&&... arguments) {
  launch_detail::launch<P...>(kernel, grid, 1, threads, shared_bytes, stream, false, static_cast<A&&>(arguments)...);
}
// The kernel may start before the one before it on the stream is over; it calls grid_dependency_wait() before it reads
// or overwrites anything of that one. Before Hopper: launch().
template <class... P, class... A>
void launch_overlapped(void (*kernel)(P...), Dim3 grid, unsigned threads, std::size_t shared_bytes, void* stream,
                       A&&... arguments) {
  launch_detail::launch<P...>(kernel, grid, 1, threads, shared_bytes, stream, true, static_cast<A&&>(arguments)...);
}
// The same in clusters (from Hopper on). Every `cluster` blocks along x run side by side. `cluster` is at most 8 and
// grid.x is a multiple of it. Each block can read the shared memory of the others and copy into it (gpu/ptx.cuh:
// cluster_sync, cluster_memory; cluster_arrive, cluster_wait, cluster_copy).
template <class... P, class... A>
void launch_overlapped_clusters(void (*kernel)(P...), Dim3 grid, unsigned cluster, unsigned threads,
                                std::size_t shared_bytes, void* stream, A&&... arguments) {
  launch_detail::launch<P...>(kernel, grid, cluster, threads, shared_bytes, stream, true,
                              static_cast<A&&>(arguments)...);
}

}  // namespace fw::cuda
