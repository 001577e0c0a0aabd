// Keys that come from the decay (KeySource::kDecay) as rows of a workspace, so that no kernel of the scan knows of
// them. They are made before a call, and their gradient is added to that of the log-decay after it.
#pragma once

#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {

class KeyFromDecay final : public Rewrite {
 public:
  explicit KeyFromDecay(const RewriteContext& context);
  size_t forward_bytes() const override { return bytes_; }
  size_t backward_bytes() const override { return 2 * bytes_; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors&, const ForwardTensors&, void*) const override {}
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string before(bool) const override { return "key_from_decay -> "; }
  std::string after(bool backward) const override { return backward ? " -> key_from_decay" : ""; }

 private:
  TokenTensor<float> rows(void* workspace) const;
  Inputs<float> with_keys(const Inputs<float>& in, void* workspace) const;

  const Plan& plan_;
  bool bf16_ = false;  // of the rows: what the chunk form's kernels copy as they are; else float32
  size_t bytes_ = 0;   // of [tokens, H, K]
};
extern const RewriteLine kKeyFromDecayRewrite;

// k = 1 - exp(g)
void make_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& k);
// dg -= exp(g) dk
void add_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& dk,
                        const TokenTensor<float>& dg);

}  // namespace fw::cuda
