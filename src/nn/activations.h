// Activations in an arena.
#pragma once

#include <cstdint>

#include "ops/exec.h"
#include "ops/new_matrix.h"

namespace fw {

// A copy of device memory that lives in the arena; null stays null.
template <class T, class Value>
Value* new_copy(const Exec<T>& exec, const Value* from, int64_t n) {
  if (from == nullptr) return nullptr;
  Value* to = exec.arena.template alloc<Value>(n);
  exec.device.copy(to, from, static_cast<size_t>(n) * sizeof(Value));
  return to;
}

}  // namespace fw
