#include "scan/cuda/rewrites/erase_over_decay.h"

#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

// Of the token form, and of the chunk form: above what its kernels bound decays of single tokens at
// (dplr_as_two_tokens.cpp).
constexpr float kLeastOfTokens = -40, kLeastOfChunks = -9;

enum RowIndex { kDivided, kDecay, kDDivided, kDDecay, kDBeta };

}  // namespace

Plan with_divided_erase_gate(Plan plan) {
  if (plan.rule.can_divide_erase_gate()) plan.rule.erase = Gate::kScalar;
  return plan;
}

EraseOverDecay::EraseOverDecay(const Plan& plan) : plan_(plan) {
  if (!plan.rule.can_divide_erase_gate()) return;
  tied_ = plan.rule.erase == Gate::kTied;
  least_ = takes_chunks(with_divided_erase_gate(plan)) ? kLeastOfChunks : kLeastOfTokens;
  constexpr size_t kAlign = 1024;
  row_bytes_ = (static_cast<size_t>(plan.tokens() * plan.HV) * sizeof(float) + kAlign - 1) / kAlign * kAlign;
}

TokenTensor<float> EraseOverDecay::rows(void* workspace, int index) const {
  TokenTensor<float> like;
  like.heads = plan_.HV;
  like.dim = 1;
  return contiguous_rows(like, plan_.T, static_cast<char*>(workspace) + static_cast<size_t>(index) * row_bytes_, false);
}

Inputs<float> EraseOverDecay::inputs(const Inputs<float>& in, void* workspace) const {
  if (row_bytes_ == 0) return in;
  Inputs<float> made = in;
  made.erase_gate = rows(workspace, kDivided);
  made.g = rows(workspace, kDecay);
  if (!with_divided_erase_gate(plan_).rule.uses_beta()) made.beta = {};
  EraseOverDecayArgs args;
  args.gate = token_arg(plan_, tied_ ? in.beta : in.erase_gate);
  args.g = token_arg(plan_, in.g);
  args.divided = token_arg(plan_, made.erase_gate);
  args.decay = token_arg(plan_, made.g);
  args.least = least_;
  divide_erase_gate(plan_, args);
  return made;
}

Inputs<float> EraseOverDecay::open(const Inputs<float>& wanted, void* workspace) const {
  if (row_bytes_ == 0) return wanted;
  Inputs<float> opened = wanted;
  const bool of_gate = tied_ ? static_cast<bool>(wanted.beta) : static_cast<bool>(wanted.erase_gate);
  if (of_gate || wanted.g) opened.erase_gate = rows(workspace, kDDivided);
  if (wanted.g) opened.g = rows(workspace, kDDecay);
  if (tied_ && wanted.beta)
    opened.beta = with_divided_erase_gate(plan_).rule.uses_beta() ? rows(workspace, kDBeta) : TokenTensor<float>{};
  return opened;
}

void EraseOverDecay::close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& wanted) const {
  if (row_bytes_ == 0) return;
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
