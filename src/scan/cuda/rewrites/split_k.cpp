#include "scan/cuda/rewrites/split_k.h"

#include "base/error.h"

namespace fw::cuda {
namespace {

constexpr int64_t kFirst = 128;  // channels of the first call

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
// Elements from a channel of a state to that of the same index in call i.
int64_t state_shift(const Plan& plan, const StateTensor<float>& t, int i) {
  return i * kFirst * (plan.state_layout == FW_STATE_K_FIRST ? t.stride_r : 1);
}

// Call i's channels of the caller's tensors.
Inputs<float> channels_of(const Plan& plan, const Inputs<float>& in, int i) {
  Inputs<float> own = in;
  const auto specs = token_specs(plan.rule);
  const int64_t dim = i == 0 ? kFirst : plan.K - kFirst;
  for (size_t token = 0; token < kTokenTensors; ++token) {
    TokenTensor<float>& t = own.*kInputTokens<float>[token];
    if (t && specs[token].width == TokenWidth::kKey) t = shifted(t, i * kFirst, dim);
  }
  own.initial_state = shifted(in.initial_state, state_shift(plan, in.initial_state, i));
  return own;
}

Outputs<float> channels_of(const Plan& plan, const Outputs<float>& out, int i) {
  Outputs<float> own = out;
  own.final_state = shifted(out.final_state, state_shift(plan, out.final_state, i));
  own.checkpoints = shifted(out.checkpoints, state_shift(plan, out.checkpoints, i));
  return own;
}

// Call i's rows of float [tokens, HV, 2, dim] at `rows`, as a tensor of tokens like `like`; absent where that is.
TokenTensor<float> rows_of(const Plan& plan, const TokenTensor<float>& like, void* rows, int i) {
  TokenTensor<float> t;
  if (!like) return t;
  t.data = static_cast<float*>(rows) + i * like.dim;
  t.heads = plan.HV, t.dim = like.dim;
  t.stride_h = 2 * like.dim, t.stride_t = plan.HV * t.stride_h, t.stride_b = plan.T * t.stride_t;
  return t;
}

void* at(void* workspace, const Region& region) { return static_cast<char*>(workspace) + region.offset; }

}  // namespace

const RewriteLine kSplitKRewrite = {
    [](const Plan& plan) { return takes_split_k(plan); },
    [](const Plan& front, int i) {
      Plan plan = front;
      plan.K = i == 0 ? kFirst : front.K - kFirst;
      return plan;
    },
    2, [](const RewriteContext& context) -> std::unique_ptr<Rewrite> { return std::make_unique<SplitK>(context); }};

SplitK::SplitK(const RewriteContext& context) : plan_(context.plan), calls_(context.kernels) {
  const size_t numbers = 2 * sizeof(float) * static_cast<size_t>(plan_.tokens() * plan_.HV),
               rows = numbers * static_cast<size_t>(plan_.V);
  o_ = d_v_ = {0, rows};
  forward_bytes_ = aligned(rows);
  d_beta_ = {aligned(rows), plan_.rule.uses_beta() ? numbers : 0};
  backward_bytes_ = d_beta_.offset + aligned(d_beta_.bytes);
  second_saved_ = aligned(calls_[0].device.saved.bytes);
}

size_t SplitK::saved_bytes(size_t) const { return second_saved_ + calls_[1].device.saved.bytes; }

ForwardTensors SplitK::open(const ForwardTensors& front, int i, void* workspace) const {
  ForwardTensors behind;
  behind.in = channels_of(plan_, front.in, i);
  behind.out = channels_of(plan_, front.out, i);
  behind.out.o = rows_of(plan_, front.out.o, at(workspace, o_), i);
  if (front.saved != nullptr) behind.saved = static_cast<char*>(front.saved) + (i == 0 ? 0 : second_saved_);
  return behind;
}

void SplitK::close(const ForwardTensors& front, const ForwardTensors&, void* workspace) const {
  const DevicePlan& second = calls_[1].device;
  add_split_k_rows(plan_, second, second.forward.common, front.in, at(workspace, o_), front.out.o,
                   static_cast<char*>(workspace) + forward_bytes_);
}

BackwardTensors SplitK::open(const BackwardTensors& front, int i, void* workspace) const {
  BackwardTensors behind;
  behind.in = channels_of(plan_, front.in, i);
  behind.d = channels_of(plan_, front.d, i);
  behind.grads = channels_of(plan_, front.grads, i);
  behind.grads.v = rows_of(plan_, front.grads.v, at(workspace, d_v_), i);
  behind.grads.beta = rows_of(plan_, front.grads.beta, at(workspace, d_beta_), i);
  if (front.saved != nullptr) behind.saved = static_cast<const char*>(front.saved) + (i == 0 ? 0 : second_saved_);
  return behind;
}

void SplitK::close(const BackwardTensors& front, const BackwardTensors&, void* workspace) const {
  const DevicePlan& second = calls_[1].device;
  // Without a saved buffer the call has made one at the start of its workspace.
  void* const tables =
      static_cast<char*>(workspace) + backward_bytes_ + (front.saved == nullptr ? second.saved.bytes : 0);
  add_split_k_rows(plan_, second, second.backward.common, front.in, at(workspace, d_v_), front.grads.v, tables);
  add_split_k_rows(plan_, second, second.backward.common, front.in, at(workspace, d_beta_), front.grads.beta, tables);
}

std::string SplitK::lines() const {
  return fmt::format("keys: two calls of {} and {} channels, whose sums are rows of the workspace\n", kFirst,
                     plan_.K - kFirst);
}

}  // namespace fw::cuda
