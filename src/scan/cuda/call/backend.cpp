// The scan on CUDA devices as a backend. Built everywhere: sizes and texts need no device, and calls without one say so
// (no_cuda/scan.cpp).
#include "scan/backend.h"

#include "gpu/device.h"
#include "scan/cuda/device_plan.h"
#include "scan/cuda/require_device.h"
#include "scan/cuda/rewrites/dplr_as_two_tokens.h"
#include "scan/cuda/rewrites/erase_over_decay.h"
#include "scan/cuda/rewrites/float16.h"
#include "scan/cuda/rewrites/gate_logits.h"
#include "scan/cuda/rewrites/key_from_decay.h"
#include "scan/cuda/scan.h"
#include "scan/cuda/token_arg.h"

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

// What the kernels after the call's edge know of it: keys of the decay and rows of float16 tensors are rows at the
// front of the workspace.
Plan with_rows(Plan plan) {
  plan.rule.key_source = KeySource::kGiven;
  if (plan.f16_io) plan.bf16_io = cuda::takes_chunks(plan);
  return plan;
}

// The workspace: rows of float16 tensors, values of gates that are given as logits, erase gates over decays, then rows
// (dplr_as_two_tokens.h) or keys of the decay, then what the kernels of the scan have. No rule has two of the latter
// three: keys of the decay come with a decay a channel (see also dplr_as_two_tokens_lacks).
class CudaCall final : public Call {
 public:
  explicit CudaCall(Plan plan)
      : Call(std::move(plan)),
        tokens_(with_rows(this->plan())),
        erase_(tokens_),
        divided_(cuda::with_divided_erase_gate(tokens_)),
        rows_(divided_),
        device_(make_device_plan()),
        halves_(this->plan(), device_.chunk_form),
        gates_(tokens_, device_.chunk_form, device_.chunks),
        bf16_keys_(device_.chunk_form && tokens_.bf16_io),
        keys_(this->plan().rule.uses_k() ? 0 : cuda::key_bytes(tokens_, bf16_keys_)) {}

  size_t forward_bytes() const override { return forward_front() + device_.forward.bytes; }
  size_t forward_saving_bytes() const override { return forward_front() + device_.forward.saving_bytes; }
  size_t backward_bytes() const override { return backward_front() + device_.backward.bytes; }
  size_t saved_bytes() const override { return gates_.saved_with(device_.saved.bytes); }
  size_t backward_alone_bytes() const override { return backward_front() + device_.backward_alone_bytes(); }
  std::string text() const override {
    return cuda::to_text(tokens_, rows_.plan(), device_, forward_front(), backward_front());
  }

  void forward(const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    const Inputs<float> tensors = check_inputs<float>(plan(), in, TensorRole::kInput);
    const Outputs<float> results = check_outputs<float>(plan(), out, TensorRole::kInput);
    cuda::require_device(device_.chunk_form);
    const Inputs<float> given = halves_.inputs(tensors, workspace);
    const Outputs<float> outputs = halves_.open(results, workspace);
    char* const values = static_cast<char*>(workspace) + halves_.forward_bytes();
    cuda::CallForms forms{fused(given, nullptr, false)};
    forms.made_last = gates_.makes_values(given, forms.gates) && !makes_rows();
    Inputs<float> inputs = gates_.values(given, forms.gates, values, saved_gates(saved));
    forms.gates = gates_.with_places(forms.gates, given, values, saved_gates(saved));
    char* const space = values + gates_.forward_bytes();
    make_keys(inputs, space);
    inputs = rows_.inputs(erase_.inputs(inputs, space), space);
    const Outputs<float> opened = rows_.open(outputs, space);
    cuda::scan_forward(rows_.plan(), device_, inputs, forms, opened, saved,
                       space + erase_.forward_bytes() + rows_.forward_bytes() + keys_);
    rows_.close(opened, outputs);
    halves_.close(outputs, results);
  }
  void backward(const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
                void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    const Inputs<float> tensors = check_inputs<float>(plan(), in, TensorRole::kInput);
    const Outputs<float> tensors_of_d = check_outputs<float>(plan(), d, TensorRole::kGradient);
    const Inputs<float> results = check_gradients<float>(plan(), grads, tensors);
    cuda::require_device(device_.chunk_form);
    const Inputs<float> given = halves_.inputs(tensors, workspace), wanted = halves_.open(results, workspace);
    const Outputs<float> cotangents = halves_.cotangents(tensors_of_d, workspace);
    char* const values = static_cast<char*>(workspace) + halves_.backward_bytes();
    cuda::CallForms forms{fused(given, &wanted, saved_gates(const_cast<void*>(saved)) != nullptr)};
    forms.parts = gates_.fused_parts(forms.gates, wanted, values);
    Inputs<float> inputs = gates_.values_in_backward(given, forms.gates, values, saved_gates(const_cast<void*>(saved)));
    forms.gates = gates_.with_places(forms.gates, given, values, saved_gates(const_cast<void*>(saved)));
    const Inputs<float> of_values = gates_.open(given, forms.gates, wanted, values);
    Inputs<float> gradients = of_values;
    char* const space = values + gates_.backward_bytes();
    make_keys(inputs, space);
    const bool adds = keys_ > 0 && gradients.g;
    if (adds) gradients.k = cuda::key_tensor(tokens_, space + keys_, bf16_keys_);
    const Inputs<float> divided = erase_.inputs(inputs, space), of_divided = erase_.open(gradients, space);
    const Inputs<float> opened = rows_.open(divided, of_divided, space);
    cuda::scan_backward(rows_.plan(), device_, rows_.inputs(divided, space), forms, rows_.cotangents(cotangents, space),
                        opened, saved, space + erase_.backward_bytes() + rows_.backward_bytes() + 2 * keys_);
    rows_.close(divided, opened, of_divided);
    erase_.close(inputs, of_divided, gradients);
    if (adds) cuda::add_key_from_decay(tokens_, inputs.g, gradients.k, gradients.g);
    gates_.close(given, forms.gates, of_values, wanted, values);
    halves_.close(wanted, results);
  }

 private:
  // null: forward leaves nothing.
  void* saved_gates(void* saved) const {
    return saved == nullptr || device_.saved.bytes == 0
               ? nullptr
               : static_cast<char*>(saved) + cuda::CallGates::saved_from(device_.saved.bytes);
  }

  // Whether other tensors of the workspace are made of the values of gates.
  bool makes_rows() const { return keys_ > 0 || rows_.forward_bytes() > 0 || erase_.forward_bytes() > 0; }
  // Of the gates that are logits, those whose values the kernels of the scan make themselves: of fused_activations().
  cuda::FusedGates fused(const Inputs<float>& in, const Inputs<float>* grads, bool made) const {
    if (makes_rows()) return {};
    const cuda::FusedGates gates = gates_.fused(in);
    return cuda::fuses_gates(tokens_, device_, in, gates, grads, made);
  }

  cuda::DevicePlan make_device_plan() const {
    const cuda::DeviceScope scope(plan().device_number);
    return cuda::make_device_plan(rows_.plan(), cuda::sm_count());
  }

  // Bytes of the workspace before what the kernels of the scan have.
  size_t forward_front() const {
    return halves_.forward_bytes() + gates_.forward_bytes() + erase_.forward_bytes() + rows_.forward_bytes() + keys_;
  }
  size_t backward_front() const {
    return halves_.backward_bytes() + gates_.backward_bytes() + erase_.backward_bytes() + rows_.backward_bytes() +
           2 * keys_;
  }

  void make_keys(Inputs<float>& inputs, void* workspace) const {
    if (keys_ == 0) return;
    inputs.k = cuda::key_tensor(tokens_, workspace, bf16_keys_);
    cuda::make_key_from_decay(tokens_, inputs.g, inputs.k);
  }

  Plan tokens_;  // with keys
  cuda::EraseOverDecay erase_;
  Plan divided_;                // with a scalar erase gate
  cuda::DplrAsTwoTokens rows_;  // and what the kernels of the scan are given
  cuda::DevicePlan device_;
  cuda::CallFloat16 halves_;
  cuda::CallGates gates_;
  bool bf16_keys_;
  size_t keys_;  // bytes
};

}  // namespace

size_t cuda::key_bytes(const Plan& plan, bool bf16) {
  return (static_cast<size_t>(plan.tokens() * plan.H * plan.K) * (bf16 ? sizeof(Bf16) : sizeof(float)) + 63) / 64 * 64;
}

TokenTensor<float> cuda::key_tensor(const Plan& plan, void* rows, bool bf16) {
  TokenTensor<float> like;
  like.heads = plan.H;
  like.dim = plan.K;
  return contiguous_rows(like, plan.T, rows, bf16);
}

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
