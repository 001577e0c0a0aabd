// Gates given as logits (recurrence.md 2.1) before a call's kernels and after them. Most kernels take values and leave
// gradients of values. If these are not the caller's, they are rows of a part of the workspace. Where prepare() and
// gradients() take the logits as they are (FusedGates), what is left here is the sums of a_log's and dt_bias's
// gradients.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/kernels.h"
#include "scan/cuda/rewrites/gate_kernels.h"
#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {

// The inputs of backward with the values of numbers where forward's kernels have left them (FusedGates::numbers).
Inputs<float> with_fused_scalars(const Plan& plan, const FusedGates& fused, const Inputs<float>& in);

class GateLogits final : public Rewrite {
 public:
  explicit GateLogits(const RewriteContext& context);

  size_t forward_bytes() const override { return forward_bytes_; }
  size_t backward_bytes() const override { return backward_bytes_; }
  // What kernels save, then values of gates of one number, of which another kernel would take longer than their bytes.
  size_t saved_bytes(size_t behind) const override {
    return behind == 0 || saved_bytes_ == 0 ? behind : saved_from(behind) + saved_bytes_;
  }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors&, const ForwardTensors&, void*) const override {}
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;

  // Of tensors that the descriptor lets one expect.
  std::string lines() const override;
  std::string before(bool backward) const override;
  std::string after(bool backward) const override;
  bool fuses(bool backward) const override { return expected(backward).any(); }

 private:
  struct Gate {
    GateSpec spec;
    bool bf16 = false, apart = false;  // the values; the gradient, in the workspace
    Region values, saved, grads, parts;
  };
  static constexpr size_t saved_from(size_t kernels_bytes) {
    constexpr size_t kAlign = 1024;
    return (kernels_bytes + kAlign - 1) / kAlign * kAlign;
  }
  // Where gates' values of a saved buffer lie; null: nothing is saved.
  char* saved_gates(const void* saved) const;

  // Of the laws that kernels may take, with the parameters of `in`, those that they do take forward or, with `grads`,
  // backward. saves: forward does; backward: it has left the values of numbers, by whatever kernel.
  FusedGates fused(const Inputs<float>& in, const Inputs<float>* grads, bool saves) const;
  FusedGates expected(bool backward) const;
  // `fused` with the buffers where kernels leave the values of numbers that they form: in `saved`, or, where that is
  // null, in the workspace.
  FusedGates with_value_buffers(const FusedGates& fused, const Inputs<float>& in, void* workspace, char* saved) const;
  // Where gradients() leaves what a_log and dt_bias take; null: they want nothing of log-decays that are fused.
  float* fused_parts(const FusedGates& fused, const Inputs<float>& grads, void* workspace) const;

  GateArg gate_arg(const Gate& gate, const Inputs<float>& in) const;
  // Whether the gate's logits of `in` become values before the kernels.
  static bool takes_values(const Gate& gate, const Inputs<float>& in, const FusedGates& fused);
  // Queues the making of values: the inputs with them in place of logits. saved (null: none, all are in the workspace):
  // where those of saved_bytes() are to be or, if they have been made, are.
  Inputs<float> values(const Inputs<float>& in, const FusedGates& fused, void* workspace, char* saved, bool made) const;
  // The gradients that the kernels are to leave. Those of log-decays (bf16 where the values are) and of gates of one
  // number (float32) lie in the workspace. Those of gates of channels lie where the caller wants those of logits.
  Inputs<float> gradients(const Inputs<float>& in, const FusedGates& fused, const Inputs<float>& grads,
                          void* workspace) const;

  const Plan& plan_;
  const DevicePlan& device_;
  bool last_;                       // else another rewrite takes the values
  size_t kernels_bytes_;            // that are saved
  FusedGates laws_;                 // that kernels may take
  std::array<Gate, kGates> gates_;  // in the order of gate_specs()
  size_t forward_bytes_ = 0, backward_bytes_ = 0, saved_bytes_ = 0;
};
extern const RewriteLine kGateLogitsRewrite;

}  // namespace fw::cuda
