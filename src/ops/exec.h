// The context that operations run in: which device and which of its memory, which functions, which precision. Chosen
// once, where a model is made; nothing above asks which device it is. exec.rmsnorm_forward(...) is the backend's
// rmsnorm_forward (ops.def has all).
#pragma once

#include <utility>

#include "base/arena.h"
#include "base/device.h"
#include "ops/ops.h"

namespace fw {

template <class T>
struct Exec {
  using W = Wide<T>;
  const Ops<T>& ops;
  Device& device;
  Arena& arena;     // device memory: activations, and scratch of operations, which give it back
  Arena& contexts;  // host memory: where a forward pass says what its backward needs
  Precision precision = Precision::kNative;
  void* libraries = nullptr;  // a backend's handles of libraries
  // Of the host's forward operations a row has the bits that it has as a decoded token (docs/numerics.md).
  bool decode_bits = false;

#define FW_OP_ARGS(...) __VA_ARGS__
#define FW_LINEAR_OP(name, args) void name(FW_OP_ARGS args) const;
#define FW_FUSED_OP(name, args) void name(FW_OP_ARGS args) const;
#define FW_OP(name, args)                              \
  template <class... Args>                             \
  void name(Args&&... arguments) const {               \
    ops.name(*this, std::forward<Args>(arguments)...); \
  }
#include "ops/ops.def"
#undef FW_OP
#undef FW_OP_ARGS
};

template <class T>
void sigmoid_columns(const Exec<T>& exec, const SigmoidColumns& of, Mat<T> y) {
  if (of.size == 0 || y.rows == 0) return;
  const Mat<T> gates = y.col_range(of.begin, of.size);
  exec.sigmoid_gate_forward(gates, nullptr, static_cast<Wide<T>>(of.scale), gates);
}

}  // namespace fw
