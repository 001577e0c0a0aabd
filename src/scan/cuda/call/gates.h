// Gates given as logits, in front of and behind a call's kernels: those take values and leave gradients of values, and know nothing of logits.
#pragma once

#include "scan/cuda/call/kernels.h"
#include "scan/cuda/call/plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

class CallGates {
 public:
  // base: of the workspace that the regions are of.
  CallGates(const Plan& plan, const DevicePlan& device, const GateRegions& regions, void* base)
      : plan_(plan), device_(device), regions_(regions), base_(static_cast<char*>(base)) {}

  // Makes the values: the inputs with them in place of logits. sequences: of the call, tables uploaded.
  Inputs<float> values(const Inputs<float>& in, const SequenceArg& sequences) const;
  // The gradients that the kernels are to leave: of a log-decay in float32 in the workspace, of other gates where the caller wants those of logits.
  Inputs<float> open(const Inputs<float>& in, const Inputs<float>& grads) const;
  // From `opened` to what the caller asks for: logits, a_log, dt_bias.
  void close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& grads, const SequenceArg& sequences) const;

 private:
  TokenTensor<float> rows_of(const TokenTensor<float>& like, const Region& region, bool bf16) const;
  GateArg gate_arg(const GateSpec& spec, const Inputs<float>& in) const;

  const Plan& plan_;
  const DevicePlan& device_;
  const GateRegions& regions_;
  char* base_;
};

// As the kernels have it (kernels.h).
TokenArg token_arg(const Plan& plan, const TokenTensor<float>& t);

}  // namespace fw::cuda
