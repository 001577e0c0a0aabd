#include "scan/cuda/call/gates.h"

namespace fw::cuda {
namespace {

const TokenTensor<float>& tensor_of(const Inputs<float>& in, const GateSpec& spec) { return in.*kInputTokens<float>[spec.token]; }

// What a log-decay has besides its logits; nothing for other gates.
DecayParameters<float> parameters_of(const Inputs<float>& in, const GateSpec& spec) {
  if (!spec.decay) return {};
  return spec.token == static_cast<size_t>(TokenIndex::g) ? in.decay : in.precond_decay;
}
HeadArg head_arg(const HeadTensor<float>& t) { return {t.data, t.stride_h, t.stride_k}; }

}  // namespace

TokenArg token_arg(const Plan& plan, const TokenTensor<float>& t) {
  TokenArg a;
  if (!t) return a;
  a.bf16 = t.bf16 != nullptr ? 1 : 0;
  a.data = a.bf16 != 0 ? static_cast<void*>(t.bf16) : static_cast<void*>(t.data);
  a.stride_b = t.stride_b;
  a.stride_t = t.stride_t;
  a.stride_h = t.stride_h;
  a.divisor = static_cast<int32_t>(plan.HV / t.heads);
  return a;
}

TokenTensor<float> CallGates::rows_of(const TokenTensor<float>& like, const Region& region, bool bf16) const {
  TokenTensor<float> rows;
  void* const data = base_ + region.offset;
  if (bf16) {
    rows.bf16 = static_cast<Bf16*>(data);
  } else {
    rows.data = static_cast<float*>(data);
  }
  rows.heads = like.heads;
  rows.dim = rows.stride_h = like.dim;
  rows.stride_t = like.heads * like.dim;
  rows.stride_b = plan_.T * rows.stride_t;
  return rows;
}

GateArg CallGates::gate_arg(const GateSpec& spec, const Inputs<float>& in) const {
  const TokenTensor<float>& x = tensor_of(in, spec);
  const DecayParameters<float> parameters = parameters_of(in, spec);
  GateArg gate;
  gate.law = gate_law<float>(spec);
  gate.heads = static_cast<int32_t>(x.heads);
  gate.channels = static_cast<int32_t>(x.dim);
  gate.x = token_arg(plan_, x);
  gate.a_log = head_arg(parameters.a_log);
  gate.dt_bias = head_arg(parameters.dt_bias);
  return gate;
}

Inputs<float> CallGates::values(const Inputs<float>& in, const SequenceArg& sequences) const {
  Inputs<float> made = in;
  const auto gates = gate_specs(plan_.rule, plan_.gates);
  for (size_t i = 0; i < kGates; ++i) {
    if (!gates[i].logits() || !tensor_of(in, gates[i])) continue;
    const TokenTensor<float> values = rows_of(tensor_of(in, gates[i]), regions_.values[i], bf16_values(plan_, device_, gates[i]));
    made.*kInputTokens<float>[gates[i].token] = values;
    GateArg gate = gate_arg(gates[i], in);
    gate.values = token_arg(plan_, values);
    gate_values(gate, sequences, plan_.tokens(), plan_.stream);
  }
  return made;
}

Inputs<float> CallGates::open(const Inputs<float>& in, const Inputs<float>& grads) const {
  Inputs<float> opened = grads;
  const auto gates = gate_specs(plan_.rule, plan_.gates);
  for (size_t i = 0; i < kGates; ++i) {
    const GateSpec& spec = gates[i];
    if (!spec.logits() || !spec.decay || !(tensor_of(grads, spec) || parameters_of(grads, spec))) continue;
    opened.*kInputTokens<float>[spec.token] = rows_of(tensor_of(in, spec), regions_.grads[i], false);
  }
  return opened;
}

void CallGates::close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& grads, const SequenceArg& sequences) const {
  const auto gates = gate_specs(plan_.rule, plan_.gates);
  for (size_t i = 0; i < kGates; ++i) {
    const GateSpec& spec = gates[i];
    if (!spec.logits() || !tensor_of(opened, spec)) continue;
    const DecayParameters<float> parameters = parameters_of(grads, spec);
    GateGradientArgs args;
    args.gate = gate_arg(spec, in);
    args.d_values = token_arg(plan_, tensor_of(opened, spec));
    args.d_x = token_arg(plan_, tensor_of(grads, spec));
    args.d_a_log = head_arg(parameters.a_log);
    args.d_dt_bias = head_arg(parameters.dt_bias);
    args.parts = reinterpret_cast<float*>(base_ + regions_.parts[i].offset);
    gate_gradients(args, sequences, plan_.tokens(), plan_.stream);
  }
}

}  // namespace fw::cuda
