#include "scan/cuda/rewrites/rewrite.h"

#include <algorithm>

#include "base/error.h"
#include "scan/cuda/rewrites/dplr_as_two_tokens.h"
#include "scan/cuda/rewrites/erase_over_decay.h"
#include "scan/cuda/rewrites/gate_logits.h"
#include "scan/cuda/rewrites/key_from_decay.h"
#include "scan/cuda/rewrites/split_k.h"
#include "scan/cuda/rewrites/staged_rows.h"

namespace fw::cuda {

// Tensors of a type that kernels do not take, or slowly, come first, then logits, of which the others take the values.
std::span<const RewriteLine> rewrites() {
  static const RewriteLine kLines[] = {kStagedRowsRewrite,      kGateLogitsRewrite,   kEraseOverDecayRewrite,
                                       kDplrAsTwoTokensRewrite, kKeyFromDecayRewrite, kSplitKRewrite};
  return kLines;
}

namespace {

template <class Bytes>
size_t most(std::span<const KernelCall> kernels, const Bytes& bytes) {
  size_t all = 0;
  for (const KernelCall& call : kernels) all = std::max(all, bytes(call.device));
  return all;
}
size_t forward_front(std::span<const std::unique_ptr<Rewrite>> rewrites) {
  size_t all = 0;
  for (const auto& rewrite : rewrites) all += rewrite->forward_bytes();
  return all;
}
size_t backward_front(std::span<const std::unique_ptr<Rewrite>> rewrites) {
  size_t all = 0;
  for (const auto& rewrite : rewrites) all += rewrite->backward_bytes();
  return all;
}
void* after(void* workspace, size_t bytes) { return static_cast<char*>(workspace) + bytes; }

}  // namespace

RewrittenCall::RewrittenCall(const Plan& plan, int sm_count, Arch arch) : plan_(plan) {
  std::vector<const RewriteLine*> lines;
  // The caller's plan is the first one, which this does not own; the token form where the GPU has no other.
  std::vector<std::shared_ptr<const Plan>> behind{{std::shared_ptr<const Plan>(), &plan}};
  if ((plan.form == FW_FORM_AUTO || plan.form == FW_FORM_DECODE) && !can_take_chunks(plan, arch)) {
    Plan token = plan;
    token.form = FW_FORM_TOKEN;
    behind.front() = std::make_shared<const Plan>(token);
  }
  for (const RewriteLine& line : cuda::rewrites()) {
    if (!line.takes(*behind.front())) continue;
    if (behind.size() > 1) fail_internal("a rewrite that makes two calls: expected no rewrite behind it");
    plans_.push_back(behind.front());
    lines.push_back(&line);
    if (line.plan == nullptr) continue;
    behind.clear();
    for (int i = 0; i < line.calls; ++i) behind.push_back(std::make_shared<const Plan>(line.plan(*plans_.back(), i)));
  }
  for (std::shared_ptr<const Plan>& known : behind) {
    DevicePlan device = make_device_plan(*known, sm_count, arch);
    kernels_.push_back({std::move(known), std::move(device)});
  }
  saved_bytes_ = kernels_.front().device.saved.bytes;
  rewrites_.resize(lines.size());
  for (size_t i = lines.size(); i-- > 0;) {
    rewrites_[i] = lines[i]->make({*plans_[i], kernels_, i + 1 == lines.size(), saved_bytes_});
    saved_bytes_ = rewrites_[i]->saved_bytes(saved_bytes_);
  }
}

size_t RewrittenCall::forward_bytes() const {
  return forward_front(rewrites_) + most(kernels_, [](const DevicePlan& d) { return d.forward.bytes; });
}
size_t RewrittenCall::forward_saving_bytes() const {
  return forward_front(rewrites_) + most(kernels_, [](const DevicePlan& d) { return d.forward.saving_bytes; });
}
size_t RewrittenCall::backward_bytes() const {
  return backward_front(rewrites_) + most(kernels_, [](const DevicePlan& d) { return d.backward.bytes; });
}
size_t RewrittenCall::backward_alone_bytes() const {
  return backward_front(rewrites_) + most(kernels_, [](const DevicePlan& d) { return d.backward_alone_bytes(); });
}
void RewrittenCall::forward_from(size_t step, size_t call, const ForwardTensors& tensors, void* workspace) const {
  if (step == rewrites_.size()) {
    const KernelCall& kernels = kernels_[call];
    return scan_forward(*kernels.plan, kernels.device, tensors.in, tensors.forms, tensors.out, tensors.saved,
                        workspace);
  }
  const Rewrite& rewrite = *rewrites_[step];
  void* const space = after(workspace, rewrite.forward_bytes());
  ForwardTensors behind;
  for (int i = 0; i < rewrite.calls(); ++i) {
    behind = rewrite.open(tensors, i, workspace);
    forward_from(step + 1, static_cast<size_t>(i), behind, space);
  }
  rewrite.close(tensors, behind, workspace);
}

void RewrittenCall::backward_from(size_t step, size_t call, const BackwardTensors& tensors, void* workspace) const {
  if (step == rewrites_.size()) {
    const KernelCall& kernels = kernels_[call];
    return scan_backward(*kernels.plan, kernels.device, tensors.in, tensors.forms, tensors.d, tensors.grads,
                         tensors.saved, workspace);
  }
  const Rewrite& rewrite = *rewrites_[step];
  void* const space = after(workspace, rewrite.backward_bytes());
  BackwardTensors behind;
  for (int i = 0; i < rewrite.calls(); ++i) {
    behind = rewrite.open(tensors, i, workspace);
    backward_from(step + 1, static_cast<size_t>(i), behind, space);
  }
  rewrite.close(tensors, behind, workspace);
}

}  // namespace fw::cuda
