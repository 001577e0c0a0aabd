// Rows of device memory as the host reads them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/device.h"
#include "base/mat.h"

namespace fw {

// Rows of a matrix in device memory become rows of the caller's in host memory, bf16 ones widened: one wait for all.
template <class T>
void read_rows(Device& device, Mat<const T> from, Mat<Wide<T>> to) {
  std::vector<T> rows(static_cast<size_t>(from.rows * from.stride));
  device.to_host(rows.data(), from.data, sizeof(T) * rows.size());
  for (int64_t r = 0; r < from.rows; ++r) {
    const T* row = rows.data() + r * from.stride;
    if constexpr (std::is_same_v<T, Wide<T>>) {
      std::copy(row, row + from.cols, to.row(r));
    } else {
      widen_bf16(from.cols, row, to.row(r));
    }
  }
}

}  // namespace fw
