// Times of calls on a device's stream, by events.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "base/device.h"
#include "gpu/launch.h"

namespace fw::bench {

// Milliseconds: the median of 20 calls, after 5 that do not count.
inline double median_ms(const Device& device, const std::function<void()>& call) {
  const auto stream = static_cast<cudaStream_t>(device.stream());
  cudaEvent_t begin, end;
  cuda::check(cudaEventCreate(&begin), "event");
  cuda::check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    cuda::check(cudaEventRecord(begin, stream), "event");
    call();
    cuda::check(cudaEventRecord(end, stream), "event");
    cuda::check(cudaEventSynchronize(end), "a kernel");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 5) times.push_back(ms);
  }
  cuda::check(cudaEventDestroy(begin), "event");
  cuda::check(cudaEventDestroy(end), "event");
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

}  // namespace fw::bench
