#include "scan/cuda/rewrites/float16.h"

#include "scan/cuda/token_arg.h"

namespace fw::cuda {

CallFloat16::CallFloat16(const Plan& plan, bool chunk_form) : plan_(plan) {
  if (!plan.f16_io) return;
  constexpr size_t kAlign = 1024;
  const auto take = [](size_t& used, int64_t numbers, bool bf16) {
    const Row row{{used, static_cast<size_t>(numbers * (bf16 ? 2 : 4))}, bf16};
    used += (row.region.bytes + kAlign - 1) / kAlign * kAlign;
    return row;
  };
  const auto specs = token_specs(plan.rule);
  // With the most heads that the tensor may have.
  const auto numbers = [&](size_t i) {
    return plan.tokens() * (specs[i].heads == TokenHeads::kKey ? plan.H : plan.HV) * specs[i].channels(plan.K, plan.V);
  };
  std::array<bool, kTokenTensors> logits{};
  for (const GateSpec& gate : gate_specs(plan.rule, plan.gates))
    logits[gate.token] = logits[gate.token] || gate.logits();
  const auto bf16 = [&](size_t i) {
    return chunk_form && !specs[i].one() && !logits[i] && i != static_cast<size_t>(TokenIndex::g);
  };
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (specs[i].used) values_[i] = take(forward_bytes_, numbers(i), bf16(i));
  }
  backward_bytes_ = forward_bytes_;
  const int64_t out = plan.tokens() * plan.HV * plan.V;
  o_ = take(forward_bytes_, out, chunk_form);
  d_o_ = take(backward_bytes_, out, chunk_form);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (specs[i].used) grads_[i] = take(backward_bytes_, numbers(i), bf16(i));
  }
}

TokenTensor<float> CallFloat16::rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const {
  return contiguous_rows(like, plan_.T, static_cast<char*>(workspace) + row.region.offset, row.bf16);
}

void CallFloat16::add(const TokenTensor<float>& halves, const TokenTensor<float>& rows, Float16Args& args) const {
  Float16Task& task = args.tasks[args.count++];
  task.halves.data = halves.f16;
  task.halves.stride_b = halves.stride_b, task.halves.stride_t = halves.stride_t,
  task.halves.stride_h = halves.stride_h;
  task.rows = token_arg(plan_, rows);
  task.heads = static_cast<int32_t>(halves.heads);
  task.dim = static_cast<int32_t>(halves.dim);
}

Float16Tokens CallFloat16::tokens() const {
  return {plan_.tokens(), plan_.packed ? plan_.tokens() : plan_.T, token_end(plan_)};
}

Inputs<float> CallFloat16::inputs(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  Float16Args args;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<float>& halves = in.*kInputTokens<float>[i];
    if (halves.f16 == nullptr) continue;
    made.*kInputTokens<float>[i] = rows_at(halves, values_[i], workspace);
    add(halves, made.*kInputTokens<float>[i], args);
  }
  from_float16(args, tokens(), plan_.stream);
  return made;
}

Outputs<float> CallFloat16::cotangents(const Outputs<float>& d, void* workspace) const {
  if (d.o.f16 == nullptr) return d;
  Outputs<float> made = d;
  made.o = rows_at(d.o, d_o_, workspace);
  Float16Args args;
  add(d.o, made.o, args);
  from_float16(args, tokens(), plan_.stream);
  return made;
}

Outputs<float> CallFloat16::open(const Outputs<float>& out, void* workspace) const {
  Outputs<float> opened = out;
  if (out.o.f16 != nullptr) opened.o = rows_at(out.o, o_, workspace);
  return opened;
}

void CallFloat16::close(const Outputs<float>& opened, const Outputs<float>& out) const {
  if (out.o.f16 == nullptr) return;
  Float16Args args;
  add(out.o, opened.o, args);
  to_float16(args, tokens(), plan_.stream);
}

Inputs<float> CallFloat16::open(const Inputs<float>& wanted, void* workspace) const {
  Inputs<float> opened = wanted;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    TokenTensor<float>& tensor = opened.*kInputTokens<float>[i];
    if (tensor.f16 != nullptr) tensor = rows_at(tensor, grads_[i], workspace);
  }
  return opened;
}

void CallFloat16::close(const Inputs<float>& opened, const Inputs<float>& wanted) const {
  Float16Args args;
  for (const auto token : kInputTokens<float>) {
    const TokenTensor<float>& halves = wanted.*token;
    if (halves.f16 != nullptr) add(halves, opened.*token, args);
  }
  to_float16(args, tokens(), plan_.stream);
}

}  // namespace fw::cuda
