#include "scan/cuda/rewrites/erase_over_decay.h"

#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

// Of the token form, and of the chunk form: above what its kernels bound decays of single tokens at
// (dplr_as_two_tokens.cpp).
constexpr float kLeastOfTokens = -40, kLeastOfChunks = -9;

enum RowIndex { kDivided, kDecay, kDDivided, kDDecay, kDBeta };

}  // namespace

// The kernels see a scalar erase gate.
const RewriteLine kEraseOverDecayRewrite = {[](const Plan& plan) { return plan.rule.can_divide_erase_gate(); },
                                            [](const Plan& front, int) {
                                              Plan plan = front;
                                              plan.rule.erase = Gate::kScalar;
                                              return plan;
                                            },
                                            1,
                                            [](const RewriteContext& context) -> std::unique_ptr<Rewrite> {
                                              return std::make_unique<EraseOverDecay>(context);
                                            }};

EraseOverDecay::EraseOverDecay(const RewriteContext& context) : plan_(context.plan) {
  tied_ = plan_.rule.erase == Gate::kTied;
  const KernelCall& kernels = context.kernels.front();
  uses_beta_ = kernels.plan->rule.uses_beta();
  least_ = kernels.device.chunk_form ? kLeastOfChunks : kLeastOfTokens;
  constexpr size_t kAlign = 1024;
  row_bytes_ = (static_cast<size_t>(plan_.tokens() * plan_.HV) * sizeof(float) + kAlign - 1) / kAlign * kAlign;
}

TokenTensor<float> EraseOverDecay::rows(void* workspace, int index) const {
  TokenTensor<float> like;
  like.heads = plan_.HV;
  like.dim = 1;
  return contiguous_rows(like, plan_.T, static_cast<char*>(workspace) + static_cast<size_t>(index) * row_bytes_, false);
}

Inputs<float> EraseOverDecay::inputs(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  made.erase_gate = rows(workspace, kDivided);
  made.g = rows(workspace, kDecay);
  if (!uses_beta_) made.beta = {};
  EraseOverDecayArgs args;
  args.gate = token_arg(plan_, tied_ ? in.beta : in.erase_gate);
  args.g = token_arg(plan_, in.g);
  args.divided = token_arg(plan_, made.erase_gate);
  args.decay = token_arg(plan_, made.g);
  args.least = least_;
  divide_erase_gate(plan_, args);
  return made;
}

ForwardTensors EraseOverDecay::open(const ForwardTensors& front, int, void* workspace) const {
  ForwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  return behind;
}

BackwardTensors EraseOverDecay::open(const BackwardTensors& front, int, void* workspace) const {
  BackwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  const Inputs<float>& wanted = front.grads;
  Inputs<float>& opened = behind.grads;
  const bool of_gate = tied_ ? static_cast<bool>(wanted.beta) : static_cast<bool>(wanted.erase_gate);
  if (of_gate || wanted.g) opened.erase_gate = rows(workspace, kDDivided);
  if (wanted.g) opened.g = rows(workspace, kDDecay);
  if (tied_ && wanted.beta) opened.beta = uses_beta_ ? rows(workspace, kDBeta) : TokenTensor<float>{};
  return behind;
}

void EraseOverDecay::close(const BackwardTensors& front, const BackwardTensors& behind, void*) const {
  const Inputs<float>&in = front.in, &wanted = front.grads, &opened = behind.grads;
  EraseOverDecayArgs args;
  args.gate = token_arg(plan_, tied_ ? in.beta : in.erase_gate);
  args.g = token_arg(plan_, in.g);
  args.d_divided = token_arg(plan_, opened.erase_gate);
  if (wanted.g) args.d_decay = token_arg(plan_, opened.g), args.d_g = token_arg(plan_, wanted.g);
  if (tied_) args.d_beta = token_arg(plan_, opened.beta);
  args.d_gate = token_arg(plan_, tied_ ? wanted.beta : wanted.erase_gate);
  args.least = least_;
  if (args.d_g.data != nullptr || args.d_gate.data != nullptr) divide_erase_gate_backward(plan_, args);
}

}  // namespace fw::cuda
