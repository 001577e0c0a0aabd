// Gates given as logits (recurrence.md 2.1) before a call's kernels and after them. Most kernels take values and leave
// gradients of values. If these are not the caller's, they are rows of a part of the workspace. Where prepare() and
// gradients() take the logits as they are (FusedGates), what is left here is the sums of a_log's and dt_bias's
// gradients.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/device_plan.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/rewrites/gate_kernels.h"
#include "scan/cuda/traits.h"
#include "scan/tensors.h"

namespace fw::cuda {

// Laws, without their parameters, of the logits that kernels may take as they are: log-decays and gates of channels in
// bf16, all or none, and those of one number a token, all or none. Of few_tokens() (token_cut.h) in the token form any,
// or none.
FusedGates fused_activations(const Plan& plan, bool chunk_form);
// Of these the ones that they do take, forward or backward too. traits: of the call, with the logits in place of values
// (backward: and the places of gradients). made: backward, of a forward that has left the values of numbers, by
// whatever kernel.
FusedGates fused_in_kernels(const Plan& plan, const DevicePlan& device, const FusedGates& laws,
                            const CallTraits& traits, bool backward, bool made);
// The inputs of backward with the values of numbers where forward's kernels have left them (CallGates::with_places).
Inputs<float> with_fused_scalars(const Plan& plan, const FusedGates& fused, const Inputs<float>& in);
// Whether a gate is one of them.
bool is_fused(const FusedGates& fused, const GateSpec& gate);

class CallGates {
 public:
  // plan: of the call; it outlives this. chunks: of all sequences, in the chunk form.
  CallGates(const Plan& plan, bool chunk_form, int64_t chunks);

  // fused_activations() with the parameters of `in`.
  FusedGates fused(const Inputs<float>& in) const;
  // Where gradients() leaves what a_log and dt_bias take; null: they want nothing of log-decays that are fused.
  float* fused_parts(const FusedGates& fused, const Inputs<float>& grads, void* workspace) const;

  // Of the workspace. Both are 0 where no gate is a logit.
  size_t forward_bytes() const { return forward_bytes_; }
  size_t backward_bytes() const { return backward_bytes_; }

  // Of what forward leaves for backward, where it leaves anything: values of gates of one number, of which another
  // kernel would take longer than their bytes.
  size_t saved_bytes() const { return saved_bytes_; }
  // Bytes in all, and where these lie, after the `scan_bytes` that the kernels of the scan leave (0: nothing is left).
  size_t saved_with(size_t scan_bytes) const {
    return scan_bytes == 0 || saved_bytes_ == 0 ? scan_bytes : saved_from(scan_bytes) + saved_bytes_;
  }
  static constexpr size_t saved_from(size_t scan_bytes) {
    constexpr size_t kAlign = 1024;
    return (scan_bytes + kAlign - 1) / kAlign * kAlign;
  }

  // In these three `fused`: what kernels form themselves, fused() or nothing.
  // Queues the making of values: the inputs with them in place of logits. saved (null: none, all are in the workspace):
  // where those of saved_bytes() are to be or, in backward, are.
  Inputs<float> values(const Inputs<float>& in, const FusedGates& fused, void* workspace, void* saved) const {
    return values(in, fused, workspace, saved, false);
  }
  Inputs<float> values_in_backward(const Inputs<float>& in, const FusedGates& fused, void* workspace,
                                   const void* saved) const {
    return values(in, fused, workspace, const_cast<void*>(saved), saved != nullptr);
  }
  // `fused` with the places where kernels leave the values of numbers that they form: in `saved`, or, where that is
  // null, in the workspace.
  FusedGates with_places(const FusedGates& fused, const Inputs<float>& in, void* workspace, void* saved) const;
  // Whether values() queues anything.
  bool makes_values(const Inputs<float>& in, const FusedGates& fused) const;
  // The gradients that the kernels are to leave. Those of log-decays (bf16 where the values are) and of gates of one
  // number (float32) lie in the workspace. Those of gates of channels lie where the caller wants those of logits.
  Inputs<float> open(const Inputs<float>& in, const FusedGates& fused, const Inputs<float>& grads,
                     void* workspace) const;
  // Queues the way from these to what the caller asks for: of logits (in), a_log, dt_bias.
  void close(const Inputs<float>& in, const FusedGates& fused, const Inputs<float>& opened, const Inputs<float>& grads,
             void* workspace) const;

 private:
  struct Gate {
    GateSpec spec;
    bool bf16 = false, apart = false;  // the values; the gradient, in the workspace
    Region values, saved, grads, parts;
  };

  GateArg gate_arg(const Gate& gate, const Inputs<float>& in) const;
  // Whether the gate's logits of `in` become values before the kernels.
  static bool takes_values(const Gate& gate, const Inputs<float>& in, const FusedGates& fused);
  Inputs<float> values(const Inputs<float>& in, const FusedGates& fused, void* workspace, void* saved, bool made) const;

  const Plan& plan_;
  int64_t chunks_;
  FusedGates laws_;
  std::array<Gate, kGates> gates_;  // in the order of gate_specs()
  size_t forward_bytes_ = 0, backward_bytes_ = 0, saved_bytes_ = 0;
};

}  // namespace fw::cuda
