// Float16 tensors of tokens (FW_F16) at the edge of a call: the kernels are given rows of the workspace in their place,
// and what those leave is rounded into the caller's. In the chunk form, whose products take bf16 operands, tensors of
// channels are rows of bf16; log-decays, logits and token scalars, and everything in the token form, are float32, which
// has every float16 number. A tensor that is float32 stays where it is.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/device_plan.h"
#include "scan/cuda/rewrites/float16_kernels.h"
#include "scan/tensors.h"

namespace fw::cuda {

class CallFloat16 {
 public:
  // plan: of the call; it outlives this.
  CallFloat16(const Plan& plan, bool chunk_form);

  // Of the workspace; 0 in calls without such tensors.
  size_t forward_bytes() const { return forward_bytes_; }
  size_t backward_bytes() const { return backward_bytes_; }

  // Queues the way of what is given: rows in its place.
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  Outputs<float> cotangents(const Outputs<float>& d, void* workspace) const;
  // Where the kernels are to leave what the caller wants, and the way from there.
  Outputs<float> open(const Outputs<float>& out, void* workspace) const;
  void close(const Outputs<float>& opened, const Outputs<float>& out) const;
  Inputs<float> open(const Inputs<float>& wanted, void* workspace) const;
  void close(const Inputs<float>& opened, const Inputs<float>& wanted) const;

 private:
  struct Row {
    Region region;
    bool bf16 = false;
  };
  TokenTensor<float> rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const;
  void add(const TokenTensor<float>& halves, const TokenTensor<float>& rows, Float16Args& args) const;
  Float16Tokens tokens() const;

  const Plan& plan_;
  std::array<Row, kTokenTensors> values_, grads_;
  Row o_, d_o_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};

}  // namespace fw::cuda
