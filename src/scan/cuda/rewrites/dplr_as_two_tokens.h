// Rules with Rule::general_erase() on kernels that know no such erase. A token is two rows of a rule with an erase key
// of its own, which the kernels have (recurrence.md section 1; the streams of a token as before):
//     row 2t:      S' = Diag(alpha) S - f (S^T p)^T     that is w = f, e = p / alpha where the erase looks before the decay (else p), z = 0
//     row 2t + 1:  S  = S' + w z^T,  o = S^T r          no decay, e = 0
// p / alpha is a number also where g = -inf. Such a decay counts as exp(-40) in the token form, which leaves 4e-18 of a
// state. In the chunk form it counts as exp(-9), which leaves 1.2e-4. There decays of single tokens are bounded in T
// and its gradients, and p / alpha must be met by the decay that it is divided by. Costs twice the rows, so that a
// chunk has 32 tokens, and copies of the tensors in the workspace.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/rewrites/rewrite.h"
#include "scan/cuda/rewrites/two_token_kernels.h"

namespace fw::cuda {

// What two rows cannot say of a rule with general_erase() and H key and HV value heads: what is expected instead; null:
// nothing.
const char* dplr_as_two_tokens_lacks(const Rule& rule, int64_t H, int64_t HV);

// Refuses what rows cannot have: offsets on the device, a ring, more tokens than half of what CUDA takes.
class DplrAsTwoTokens final : public Rewrite {
 public:
  explicit DplrAsTwoTokens(const RewriteContext& context);
  size_t forward_bytes() const override { return forward_bytes_; }
  size_t backward_bytes() const override { return backward_bytes_; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors& front, const ForwardTensors& behind, void* workspace) const override;
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string lines() const override;
  std::string before(bool) const override { return "dplr -> "; }
  std::string after(bool) const override { return " -> dplr"; }

 private:
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  // The second rows are those of `from`, the first 0.
  void expand_second(const TokenTensor<float>& from, const TokenTensor<float>& to) const;
  Inputs<float> gradients(const Inputs<float>& in, const Inputs<float>& wanted, void* workspace) const;
  TokenTensor<float> rows_at(const TokenTensor<float>& like, const Region& region, void* workspace) const;
  RowTokens tokens() const;

  const Plan& plan_;
  const Plan& rows_;  // two for each token
  bool before_decay_ = false;
  float least_ = 0;                                   // log-decay of a row
  std::array<Region, kTokenTensors> values_, grads_;  // of the rows' tensors; erase_write has none
  Region o_, d_o_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};
extern const RewriteLine kDplrAsTwoTokensRewrite;

}  // namespace fw::cuda
