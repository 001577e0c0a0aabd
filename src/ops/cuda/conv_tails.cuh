// What convolutions over packed sequences keep between passes: the last inputs of every sequence.
#pragma once

#include "gpu/launch.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {

inline constexpr unsigned kTailThreads = 128;

// to [N, kept, cols]: the last `kept` rows of x of every sequence; one that is shorter keeps the end of its old tail
// (null: zeros). A thread has a column and goes from the oldest to the newest, so that both tails may be the same
// memory.
template <class T>
__global__ void __launch_bounds__(kTailThreads)
    store_tails_kernel(Mat<const T> x, const int64_t* offsets, const T* tail, int kept, T* to) {
  follow();
  const int64_t c = int64_t{block_index_y()} * kTailThreads + thread_index(), n = block_index_x();
  if (c >= x.cols) return;
  const int64_t begin = offsets[n], length = offsets[n + 1] - begin;
  for (int i = 0; i < kept; ++i) {
    const int64_t position = length - kept + i;
    T value{};
    if (position >= 0) {
      value = x.data[(begin + position) * x.stride + c];
    } else if (tail != nullptr) {
      value = tail[(n * kept + i + length) * x.cols + c];
    }
    to[(n * kept + i) * x.cols + c] = value;
  }
}

template <class T>
void store_tails(Mat<const T> x, const PassLayout& layout, const T* tail, int64_t width, T* to, void* stream) {
  if (to == nullptr || width < 2) return;
  const Dim3 grid{static_cast<unsigned>(layout.host.count()),
                  static_cast<unsigned>((x.cols + kTailThreads - 1) / kTailThreads)};
  launch_following(x.rows, store_tails_kernel<T>, grid, kTailThreads, 0, stream, x, layout.offsets, tail,
                   static_cast<int>(width - 1), to);
}

}  // namespace fw::cuda
