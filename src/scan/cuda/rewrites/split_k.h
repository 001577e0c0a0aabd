// Keys of 129 to 256 channels of rules without an erase whose channels decay each by its own. Nothing that a channel of
// the state does reaches another one. So a call is one of the first 128 channels and one of the others. What all
// channels make together (outputs, the values' and the gain's gradients) is the sum of both. It is summed in float32
// rows of the workspace before it is rounded.
#pragma once

#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {

class SplitK final : public Rewrite {
 public:
  explicit SplitK(const RewriteContext& context);
  size_t forward_bytes() const override { return forward_bytes_; }
  size_t backward_bytes() const override { return backward_bytes_; }
  size_t saved_bytes(size_t behind) const override;  // one after the other
  int calls() const override { return 2; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors& front, const ForwardTensors& behind, void* workspace) const override;
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string lines() const override;
  std::string before(bool) const override { return "twice: "; }
  std::string after(bool) const override { return "; gradients/sum_groups"; }

 private:
  const Plan& plan_;
  std::span<const KernelCall> calls_;
  // float [tokens, HV, 2, V] (the gain: [tokens, HV, 2]); o forward, the others backward
  Region o_, d_v_, d_beta_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0, second_saved_ = 0;
};
extern const RewriteLine kSplitKRewrite;

// to[t, h, :] = the sum of the rows of both calls. call: any of the two, whose tables of packed sequences lie in its
// workspace.
void add_split_k_rows(const Plan& plan, const DevicePlan& call, const CommonRegions& regions, const Inputs<float>& in,
                      void* rows, const TokenTensor<float>& to, void* workspace);

}  // namespace fw::cuda
