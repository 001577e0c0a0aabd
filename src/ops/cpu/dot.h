#pragma once

#include <cstdint>

namespace fw {

// a . b of n numbers, in eight sums, which are one vector: always the same order.
template <class T>
T dot(const T* a, const T* b, int64_t n) {
  constexpr int64_t kLanes = 8;
  T sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  T sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const T lane : sums) sum += lane;
  return sum;
}

}  // namespace fw
