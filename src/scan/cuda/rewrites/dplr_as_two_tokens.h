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

#include "scan/cuda/device_plan.h"
#include "scan/cuda/rewrites/two_token_kernels.h"
#include "scan/tensors.h"

namespace fw::cuda {

// What two rows cannot say of a rule with general_erase() and H key and HV value heads: what is expected instead; null:
// nothing.
const char* dplr_as_two_tokens_lacks(const Rule& rule, int64_t H, int64_t HV);

class DplrAsTwoTokens {
 public:
  // plan: of the call, without what dplr_as_two_tokens_lacks(); it outlives this. Throws Error(kUsage) for what rows
  // cannot have: slots of tokens, offsets on the device, more tokens than half of what CUDA takes.
  explicit DplrAsTwoTokens(const Plan& plan);
  bool used() const { return used_; }
  // Of the rows; the call's own where it has one row a token.
  const Plan& plan() const { return rows_; }

  // Of the workspace. All are 0, and what follows does nothing, where a token is one row.
  size_t forward_bytes() const { return forward_bytes_; }
  size_t backward_bytes() const { return backward_bytes_; }

  // Queues the making of rows: the inputs with them; of the cotangents o alone changes.
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  Outputs<float> cotangents(const Outputs<float>& d, void* workspace) const;
  // Where the kernels leave o, and the way from there to what the caller asks for.
  Outputs<float> open(const Outputs<float>& out, void* workspace) const;
  void close(const Outputs<float>& opened, const Outputs<float>& out) const;
  // The same of gradients.
  Inputs<float> open(const Inputs<float>& in, const Inputs<float>& wanted, void* workspace) const;
  void close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& wanted) const;

 private:
  TokenTensor<float> rows_at(const TokenTensor<float>& like, const Region& region, void* workspace) const;
  RowTokens tokens() const;

  const Plan& plan_;
  Plan rows_;
  bool used_ = false, before_decay_ = false;
  float least_ = 0;                                   // log-decay of a row
  std::array<Region, kTokenTensors> values_, grads_;  // of the rows' tensors; erase_write has none
  Region o_, d_o_;
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};

}  // namespace fw::cuda
