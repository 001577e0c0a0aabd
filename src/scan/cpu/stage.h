// Tensors of bf16 or float16 numbers at the edge of the scan. A task works on float copies of the rows of its sequence
// and head. The copies are made before it and, for what it writes, rounded once when it is done. So sums over the value
// heads of a group are sums of floats. A plan without them takes no room here and copies nothing.
#pragma once

#include <array>

#include "scan/cpu/head_scan.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cpu {

// The float copies of one thread: a slot for each tensor that the rule takes, of the longest sequence's rows.
template <class T>
class Stage {
 public:
  // backward: also slots for the gradients. With a null base the bump only counts.
  Stage(const Plan& plan, bool backward, Bump<T>& bump);

  // The inputs (cotangents) of one value head, narrow ones replaced by copies; those of its key head are read when
  // `key_heads` and otherwise taken as they were left.
  Inputs<T> read(const Inputs<T>& in, int64_t n, int64_t hv, bool key_heads);
  Outputs<T> read(const Outputs<T>& d, int64_t n, int64_t hv);

  // Room for what a task writes in place of the caller's narrow tensors; add: with the caller's numbers in it.
  Outputs<T> open(const Outputs<T>& out);
  Inputs<T> open(const Inputs<T>& grads);
  Inputs<T> open_to_add(const Inputs<T>& grads, int64_t n, int64_t hv);
  // Its rounding into the caller's rows: of the value columns [column0, column0 + columns), of the gradients of value
  // head hv (tensors with a head each) or of its key head (tensors with a key head's).
  void close(const Outputs<T>& out, const Outputs<T>& staged, int64_t n, int64_t hv, int64_t column0,
             int64_t columns) const;
  void close(const Inputs<T>& grads, const Inputs<T>& staged, int64_t n, int64_t hv, bool key_heads) const;

 private:
  TokenTensor<T> copy_of(const TokenTensor<T>& tensor, T* slot) const;
  void widen(const TokenTensor<T>& tensor, const TokenTensor<T>& copy, int64_t n, int64_t hv) const;
  void round(const TokenTensor<T>& copy, const TokenTensor<T>& tensor, int64_t n, int64_t hv, int64_t column0,
             int64_t columns) const;
  bool per_value_head(const TokenTensor<T>& tensor) const { return tensor.heads == plan_.HV; }

  const Plan& plan_;
  std::array<T*, kTokenTensors> inputs_{}, grads_{};
  T* o_ = nullptr;
};

}  // namespace fw::cpu
