// The context that operations run in: which backend, which memory, which precision. Chosen once, where a model is made; nothing above
// asks which device it is. exec.rmsnorm_forward(...) is the backend's rmsnorm_forward (ops.def has all of them).
#pragma once

#include <utility>

#include "base/arena.h"
#include "ops/ops.h"

namespace fw {

template <class T>
struct Exec {
  const Ops<T>& ops;
  Arena& arena;  // activations, and scratch of operations, which give it back
  Precision precision = Precision::kNative;

#define FW_OP(name, args)                              \
  template <class... Args>                             \
  void name(Args&&... arguments) const {               \
    ops.name(*this, std::forward<Args>(arguments)...); \
  }
#include "ops/ops.def"
#undef FW_OP
};

}  // namespace fw
