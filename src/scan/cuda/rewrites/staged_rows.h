// Tensors of tokens of another type than the kernels', at the edge of a call: the kernels are given rows of the
// workspace in their place, and what those leave is rounded into the caller's. In the chunk form, whose products take
// bf16 operands, tensors of channels that are float16 (FW_F16) or float32 are rows of bf16. Other float16 tensors
// (log-decays, logits, token scalars, and all in the token form) are rows of float32, and float32 ones stay where they
// are. A call that has no io_dtype is staged where its rows are whole vectors as bf16.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/rewrites/rewrite.h"
#include "scan/cuda/rewrites/staged_rows_kernels.h"

namespace fw::cuda {

class StagedRows final : public Rewrite {
 public:
  explicit StagedRows(const RewriteContext& context);
  size_t forward_bytes() const override { return forward_bytes_; }
  size_t backward_bytes() const override { return backward_bytes_; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors& front, const ForwardTensors& behind, void* workspace) const override;
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string lines() const override;
  std::string before(bool) const override { return "stage_rows -> "; }
  std::string after(bool) const override { return " -> stage_rows"; }

 private:
  struct Row {
    Region region;
    bool bf16 = false;
  };
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  bool stages(const TokenTensor<float>& tensor, const Row& row) const;
  TokenTensor<float> rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const;
  void add(const TokenTensor<float>& tensor, const TokenTensor<float>& rows, StageArgs& args) const;
  StageTokens tokens() const;

  const Plan& plan_;
  std::array<Row, kTokenTensors> values_, grads_;
  Row o_, d_o_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};
extern const RewriteLine kStagedRowsRewrite;

}  // namespace fw::cuda
