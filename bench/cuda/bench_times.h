// What benchmarks of kernels share: device memory, and times by events on the device.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "gpu/launch.h"

namespace fw::cuda::bench {

template <class T>
T* allocate(int64_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(p);
}

// Of 20 launches, after 5 that do not count.
inline double median_ms(const std::function<void()>& launch_once) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    check(cudaEventRecord(begin), "event");
    launch_once();
    check(cudaEventRecord(end), "event");
    check(cudaEventSynchronize(end), "a kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 5) times.push_back(ms);
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace fw::cuda::bench
