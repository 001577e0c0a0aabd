#include "scan/cuda/rewrites/split_k.h"

#include <algorithm>

namespace fw::cuda {
namespace {

constexpr size_t kAlign = 1024;
size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

TokenTensor<float> shifted(TokenTensor<float> t, int64_t channels, int64_t dim) {
  if (t.data != nullptr) t.data += channels;
  if (t.bf16 != nullptr) t.bf16 += channels;
  t.dim = dim;
  return t;
}
StateTensor<float> shifted(StateTensor<float> t, int64_t elements) {
  if (t.data != nullptr) t.data += elements;
  if (t.bf16 != nullptr) t.bf16 += elements;
  return t;
}
// Elements from one channel of a state to kSplitK further.
int64_t state_shift(const Plan& plan, const StateTensor<float>& t, int half) {
  return half * kSplitK * (plan.state_layout == FW_STATE_K_FIRST ? t.stride_r : 1);
}

}  // namespace

void plan_split_k(const Plan& plan, int sm_count, DevicePlan& device) {
  auto halves = std::make_shared<SplitK>();
  size_t forward = 0, backward = 0;
  for (int i = 0; i < 2; ++i) {
    halves->plans[i] = plan;
    halves->plans[i].K = i == 0 ? kSplitK : plan.K - kSplitK;
    const DevicePlan& half = halves->devices[i] = make_device_plan(halves->plans[i], sm_count);
    halves->saved[i] = i == 0 ? 0 : aligned(halves->devices[0].saved.bytes);
    forward = std::max(forward, half.forward.bytes), backward = std::max(backward, half.backward.bytes);
  }
  const size_t numbers = 2 * sizeof(float) * static_cast<size_t>(plan.tokens() * plan.HV),
               rows = numbers * static_cast<size_t>(plan.V);
  halves->o = halves->d_v = {0, rows};
  halves->forward_at = aligned(rows);
  halves->d_beta = {aligned(rows), plan.rule.uses_beta() ? numbers : 0};
  halves->backward_at = halves->d_beta.offset + aligned(halves->d_beta.bytes);
  device.forward.bytes = device.forward.saving_bytes = halves->forward_at + forward;
  device.backward.bytes = halves->backward_at + backward;
  device.saved.bytes = halves->saved[1] + halves->devices[1].saved.bytes;
  device.halves = std::move(halves);
}

Inputs<float> half_of(const Plan& plan, const Inputs<float>& in, int half) {
  Inputs<float> own = in;
  const auto specs = token_specs(plan.rule);
  const int64_t dim = half == 0 ? kSplitK : plan.K - kSplitK;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    TokenTensor<float>& t = own.*kInputTokens<float>[i];
    if (t && specs[i].width == TokenWidth::kKey) t = shifted(t, half * kSplitK, dim);
  }
  own.initial_state = shifted(in.initial_state, state_shift(plan, in.initial_state, half));
  return own;
}

Outputs<float> half_of(const Plan& plan, const Outputs<float>& out, int half) {
  Outputs<float> own = out;
  own.final_state = shifted(out.final_state, state_shift(plan, out.final_state, half));
  own.checkpoints = shifted(out.checkpoints, state_shift(plan, out.checkpoints, half));
  return own;
}

TokenTensor<float> half_rows(const Plan& plan, const TokenTensor<float>& like, void* rows, int half) {
  TokenTensor<float> t;
  if (!like) return t;
  t.data = static_cast<float*>(rows) + half * like.dim;
  t.heads = plan.HV, t.dim = like.dim;
  t.stride_h = 2 * like.dim, t.stride_t = plan.HV * t.stride_h, t.stride_b = plan.T * t.stride_t;
  return t;
}

}  // namespace fw::cuda
