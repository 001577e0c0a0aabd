// Matrices of activations [rows, cols] in an arena, whose rows begin at multiples of 64 bytes.
#pragma once

#include <cstdint>

#include "base/arena.h"
#include "base/mat.h"

namespace fw {

template <class T>
Mat<T> new_matrix(Arena& arena, int64_t rows, int64_t cols) {
  constexpr int64_t kAlign = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t stride = (cols + kAlign - 1) / kAlign * kAlign;
  return {arena.alloc<T>(rows * stride), rows, cols, stride};
}

}  // namespace fw
