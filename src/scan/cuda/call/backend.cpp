// The scan on CUDA devices as a backend. Built everywhere: sizes and texts need no device, and calls without one say so
// (no_cuda/scan.cpp).
#include "scan/backend.h"

#include <optional>

#include "base/error.h"
#include "gpu/device.h"
#include "scan/cuda/require_device.h"
#include "scan/cuda/rewrites/dplr_as_two_tokens.h"
#include "scan/cuda/rewrites/rewrite.h"

namespace fw {
namespace {

constexpr int64_t kMostKey = 256;      // registers of the token kernels
constexpr int64_t kMostHeads = 65535;  // of a grid's second and third dimension
// rows are 32-bit numbers, a chunk beyond the end too
constexpr int64_t kMostTokens = (int64_t{1} << 31) - cuda::kChunk;

const char* lacks(const Rule& rule, int64_t H, int64_t HV) {
  if (rule.uses_precond() && rule.precond_form == PrecondForm::kTanh) return "precond_form=squash";
  return cuda::dplr_as_two_tokens_lacks(rule, H, HV);
}

class CudaCall final : public Call {
 public:
  explicit CudaCall(Plan plan_of_caller) : Call(std::move(plan_of_caller)), call_(rewritten(plan())) {
    if (plan().form != FW_FORM_DECODE || !call_.chunk_form()) return;
    token_plan_ = plan();
    token_plan_.form = FW_FORM_TOKEN;
    const cuda::DeviceScope scope(plan().device_number);
    token_.emplace(token_plan_, cuda::sm_count(), arch());
  }

  size_t forward_bytes() const override { return cuda::forward_bytes(call_, token()); }
  size_t forward_saving_bytes() const override { return token_ ? forward_bytes() : call_.forward_saving_bytes(); }
  size_t backward_bytes() const override { return call_.backward_bytes(); }
  size_t saved_bytes() const override { return call_.saved_bytes(); }
  size_t backward_alone_bytes() const override { return call_.backward_alone_bytes(); }
  std::string text() const override { return cuda::to_text(call_, token()); }

  void forward(const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    cuda::ForwardTensors tensors;
    tensors.in = check_inputs<float>(plan(), in, TensorRole::kInput);
    tensors.out = check_outputs<float>(plan(), out, TensorRole::kInput);
    tensors.saved = saved;
    check_ring_tensors<float>(plan(), tensors.in, tensors.out);
    cuda::require_device(call_.chunk_form());
    if (plan().ring && !plan().slots.skips) cuda::fold_ring(plan(), tensors.in, tensors.out);
    if (!token_) return call_.forward(tensors, workspace);
    // First what backward takes: final states may be written where initial ones lie.
    if (saved != nullptr) {
      cuda::ForwardTensors saving = tensors;
      saving.out = {};
      call_.forward(saving, workspace);
    }
    tensors.saved = nullptr;
    token_->forward(tensors, workspace);
  }
  void backward(const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
                void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    cuda::BackwardTensors tensors;
    tensors.in = check_inputs<float>(plan(), in, TensorRole::kInput);
    tensors.d = check_outputs<float>(plan(), d, TensorRole::kGradient);
    tensors.grads = check_gradients<float>(plan(), grads, tensors.in);
    tensors.saved = saved;
    cuda::require_device(call_.chunk_form());
    call_.backward(tensors, workspace);
  }

 private:
  // Where there is no GPU, the plan is that of an H100 or H200.
  static cuda::Arch arch() {
    const cuda::Arch current = cuda::current_arch();
    return current == cuda::Arch::kNone ? cuda::Arch::kSm90 : current;
  }
  static cuda::RewrittenCall rewritten(const Plan& plan) {
    const cuda::DeviceScope scope(plan.device_number);
    return {plan, cuda::sm_count(), arch()};
  }
  const cuda::RewrittenCall* token() const { return token_ ? &*token_ : nullptr; }

  cuda::RewrittenCall call_;
  // Of FW_FORM_DECODE, where call_ runs in chunks: what makes outputs and final states. call_ then makes what backward
  // takes.
  Plan token_plan_;
  std::optional<cuda::RewrittenCall> token_;
};

}  // namespace

const Backend& cuda_backend() {
  static constexpr Backend kBackend = {
      "CUDA",
      false,
      kMostKey,
      kMostHeads,
      kMostTokens,
      cuda::kChunk,
      true,
      true,
      lacks,
      [] { cuda::require_device(true); },
      [](Plan plan) -> std::unique_ptr<Call> { return std::make_unique<CudaCall>(std::move(plan)); }};
  return kBackend;
}

}  // namespace fw
