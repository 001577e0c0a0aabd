#include "scan/cuda/rewrites/key_from_decay.h"

#include "scan/cuda/token_arg.h"

namespace fw::cuda {

const RewriteLine kKeyFromDecayRewrite = {
    [](const Plan& plan) { return !plan.rule.uses_k(); },
    [](const Plan& front, int) {
      Plan plan = front;
      plan.rule.key_source = KeySource::kGiven;
      return plan;
    },
    1,
    [](const RewriteContext& context) -> std::unique_ptr<Rewrite> { return std::make_unique<KeyFromDecay>(context); }};

KeyFromDecay::KeyFromDecay(const RewriteContext& context)
    : plan_(context.plan), bf16_(context.kernels.front().device.chunk_form && plan_.bf16_io) {
  const size_t numbers = static_cast<size_t>(plan_.tokens() * plan_.H * plan_.K);
  bytes_ = (numbers * (bf16_ ? sizeof(Bf16) : sizeof(float)) + 63) / 64 * 64;
}

TokenTensor<float> KeyFromDecay::rows(void* workspace) const {
  TokenTensor<float> like;
  like.heads = plan_.H;
  like.dim = plan_.K;
  return contiguous_rows(like, plan_.T, workspace, bf16_);
}

Inputs<float> KeyFromDecay::with_keys(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  made.k = rows(workspace);
  make_key_from_decay(plan_, in.g, made.k);
  return made;
}

ForwardTensors KeyFromDecay::open(const ForwardTensors& front, int, void* workspace) const {
  ForwardTensors behind = front;
  behind.in = with_keys(front.in, workspace);
  return behind;
}

BackwardTensors KeyFromDecay::open(const BackwardTensors& front, int, void* workspace) const {
  BackwardTensors behind = front;
  behind.in = with_keys(front.in, workspace);
  if (front.grads.g) behind.grads.k = rows(static_cast<char*>(workspace) + bytes_);
  return behind;
}

void KeyFromDecay::close(const BackwardTensors& front, const BackwardTensors& behind, void*) const {
  if (front.grads.g) add_key_from_decay(plan_, front.in.g, behind.grads.k, front.grads.g);
}

}  // namespace fw::cuda
