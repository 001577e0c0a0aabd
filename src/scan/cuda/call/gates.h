// Gates given as logits (recurrence.md 2.1) in front of a call's kernels and behind them: those take values and leave gradients of values, and no kernel of the
// scan knows of logits. Values, and gradients that are not the caller's, are rows of a part of the workspace.
#pragma once

#include <array>
#include <cstddef>

#include "scan/cuda/call/plan.h"
#include "scan/cuda/gates/kernels.h"
#include "scan/tensors.h"

namespace fw::cuda {

// Whether the values of this gate are bf16: those of gates and log-decays of channels where the call's tensors are and its products too, for such rows are what
// kernels look for. Gates and log-decays of one number stay float32.
bool bf16_values(const Plan& plan, bool chunk_form, const GateSpec& gate);

class CallGates {
 public:
  // plan: of the call; it outlives this.
  CallGates(const Plan& plan, bool chunk_form);

  // Of the workspace. Both are 0 where no gate is a logit.
  size_t forward_bytes() const { return forward_bytes_; }
  size_t backward_bytes() const { return backward_bytes_; }

  // Queues the making of values: the inputs with them in place of logits.
  Inputs<float> values(const Inputs<float>& in, void* workspace) const;
  // The gradients that the kernels are to leave: of log-decays (bf16 where the values are) and of gates of one number (float32) in the workspace, of gates of
  // channels where the caller wants those of logits.
  Inputs<float> open(const Inputs<float>& in, const Inputs<float>& grads, void* workspace) const;
  // Queues the way from these to what the caller asks for: of logits (in), a_log, dt_bias.
  void close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& grads, void* workspace) const;

 private:
  struct Gate {
    GateSpec spec;
    bool bf16 = false, apart = false;  // the values; the gradient, in the workspace
    Region values, grads, parts;
  };

  GateArg gate_arg(const Gate& gate, const Inputs<float>& in) const;

  const Plan& plan_;
  std::array<Gate, kGates> gates_;  // in the order of gate_specs()
  size_t forward_bytes_ = 0, backward_bytes_ = 0;
};

}  // namespace fw::cuda
