// What the benches of operations on the CPU share: medians of calls, after one that is not counted.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <vector>

namespace fw::bench {

// Microseconds since some time: of the clock on the wall, or of the processor, all threads together, which counts where
// other work runs beside.
inline double wall_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double processor_us() { return 1e6 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Median of `repeats` calls, a token of `tokens`.
template <class Call>
double median_us_token(double (*now)(), int repeats, int64_t tokens, const Call& call) {
  std::vector<double> times;
  call();
  for (int i = 0; i < repeats; ++i) {
    const double begin = now();
    call();
    times.push_back(now() - begin);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / static_cast<double>(tokens);
}

}  // namespace fw::bench
