// Keys of 129 to 256 channels of rules without an erase whose channels decay each by its own. Nothing that a channel of
// the state does reaches another one. So a call is one of the first 128 channels and one of the others. What all
// channels make together (outputs, the values' and the gain's gradients) is the sum of both. It is summed in float32
// rows of the workspace before it is rounded.
#pragma once

#include "scan/cuda/device_plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

inline constexpr int64_t kSplitK = 128;

struct SplitK {
  Plan plans[2];
  DevicePlan devices[2];
  size_t saved[2] = {};  // where the saved buffer of each begins
  // float [tokens, HV, 2, V] (the gain: [tokens, HV, 2]), at the workspace's start; forward, backward
  Region o, d_v, d_beta;
  size_t forward_at = 0, backward_at = 0;  // where the halves' own workspace begins
};

// The sizes of both in `device`. plan: of a call with split_rule() (rule_traits.h) and so many channels.
void plan_split_k(const Plan& plan, int sm_count, DevicePlan& device);

// The first (or second) half's channels of the caller's tensors.
Inputs<float> half_of(const Plan& plan, const Inputs<float>& in, int half);
Outputs<float> half_of(const Plan& plan, const Outputs<float>& out, int half);
// A half's rows of float [tokens, HV, 2, dim] at `rows`, as a tensor of tokens like `like`; absent where that is.
TokenTensor<float> half_rows(const Plan& plan, const TokenTensor<float>& like, void* rows, int half);

}  // namespace fw::cuda
