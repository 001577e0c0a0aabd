// Tensors of bf16 or float16 numbers at the edge of the scan. A task works on float copies of the rows of its sequence
// and head. Backward's are made before it and, for what it writes, rounded once when it is done. So sums over the value
// heads of a group are sums of floats. Forward has those of a chunk at a time. A plan without them takes no room here
// and copies nothing.
#pragma once

#include <array>

#include "scan/cpu/head_scan.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cpu {

// The float copies of one thread: a slot for each tensor that the rule takes, of the longest sequence's rows, or of a
// chunk's.
template <class T>
class Stage {
 public:
  // backward: also slots for the gradients. With a null base the bump only counts.
  Stage(const Plan& plan, bool backward, Bump<T>& bump);

  // The inputs (cotangents) of one value head, narrow ones replaced by copies; those of its key head are read when
  // `key_heads` and otherwise taken as they were left.
  Inputs<T> read(const Inputs<T>& in, int64_t n, int64_t hv, bool key_heads);
  Outputs<T> read(const Outputs<T>& d, int64_t n, int64_t hv);

  // Room for the inputs and for what a task writes in place of the caller's narrow tensors; to_add: with the caller's
  // numbers in it.
  Outputs<T> open(const Outputs<T>& out) const;
  Inputs<T> open_inputs(const Inputs<T>& in) const;
  Inputs<T> open(const Inputs<T>& grads);
  Inputs<T> open_to_add(const Inputs<T>& grads, int64_t n, int64_t hv);
  // Its rounding into the caller's rows: of the gradients of value head hv (tensors with a head each) or of its key
  // head (tensors with a key head's).
  void close(const Inputs<T>& grads, const Inputs<T>& staged, int64_t n, int64_t hv, bool key_heads) const;

 private:
  TokenTensor<T> copy_of(const TokenTensor<T>& tensor, T* slot) const;
  // Rows [begin, begin + rows), and of o the value columns [column0, column0 + columns).
  void widen(const TokenTensor<T>& tensor, const TokenTensor<T>& copy, int64_t n, int64_t hv, int64_t begin,
             int64_t rows) const;
  void round(const TokenTensor<T>& copy, const TokenTensor<T>& tensor, int64_t n, int64_t hv, int64_t begin,
             int64_t rows, int64_t column0, int64_t columns) const;
  bool per_value_head(const TokenTensor<T>& tensor) const { return tensor.heads == plan_.HV; }

  template <class U>
  friend class StagedChunks;

  const Plan& plan_;
  std::array<T*, kTokenTensors> inputs_{}, grads_{};
  T* o_ = nullptr;
};

// A forward task's copies.
template <class T>
class StagedChunks final : public RowCopies<T> {
 public:
  StagedChunks(const Stage<T>& stage, const Inputs<T>& in, const Outputs<T>& out, int64_t n, int64_t hv,
               int64_t column0, int64_t columns);
  void load(int64_t begin, int64_t rows) override;
  void store(int64_t begin, int64_t rows) override;
  // In place of the caller's.
  const Inputs<T>& in() const { return in_; }
  const Outputs<T>& out() const { return out_; }

 private:
  const Stage<T>& stage_;
  const Inputs<T>& caller_in_;
  const Outputs<T>& caller_out_;
  const int64_t n_, hv_, column0_, columns_;
  Inputs<T> in_;
  Outputs<T> out_;
};

}  // namespace fw::cpu
