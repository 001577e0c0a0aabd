// Activations in an arena: matrices [tokens, cols] whose rows begin at multiples of 64 bytes.
#pragma once

#include <cstdint>

#include "base/arena.h"
#include "base/mat.h"
#include "ops/exec.h"

namespace fw {

template <class T>
Mat<T> new_matrix(Arena& arena, int64_t rows, int64_t cols) {
  constexpr int64_t kAlign = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t stride = (cols + kAlign - 1) / kAlign * kAlign;
  return {arena.alloc<T>(rows * stride), rows, cols, stride};
}

// A copy of device memory that lives in the arena; null stays null.
template <class T, class Value>
Value* new_copy(const Exec<T>& exec, const Value* from, int64_t n) {
  if (from == nullptr) return nullptr;
  Value* to = exec.arena.template alloc<Value>(n);
  exec.device.copy(to, from, static_cast<size_t>(n) * sizeof(Value));
  return to;
}

}  // namespace fw
