// Float16 tensors of tokens (FW_F16) at the edge of a call: the kernels are given rows of the workspace in their place,
// and what those leave is rounded into the caller's. In the chunk form, whose products take bf16 operands, tensors of
// channels are rows of bf16; log-decays, logits and token scalars, and everything in the token form, are float32, which
// has every float16 number. A tensor that is float32 stays where it is.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/rewrites/float16_kernels.h"
#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {

class StagedFloat16 final : public Rewrite {
 public:
  explicit StagedFloat16(const RewriteContext& context);
  size_t forward_bytes() const override { return forward_bytes_; }
  size_t backward_bytes() const override { return backward_bytes_; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors& front, const ForwardTensors& behind, void* workspace) const override;
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string before(bool) const override { return "float16 -> "; }
  std::string after(bool) const override { return " -> float16"; }

 private:
  struct Row {
    Region region;
    bool bf16 = false;
  };
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  TokenTensor<float> rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const;
  void add(const TokenTensor<float>& tensor, const TokenTensor<float>& rows, Float16Args& args) const;
  Float16Tokens tokens() const;

  const Plan& plan_;
  std::array<Row, kTokenTensors> values_, grads_;
  Row o_, d_o_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};
extern const RewriteLine kFloat16Rewrite;

}  // namespace fw::cuda
