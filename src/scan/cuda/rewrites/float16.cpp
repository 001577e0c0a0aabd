#include "scan/cuda/rewrites/float16.h"

#include "scan/cuda/token_arg.h"

namespace fw::cuda {

const RewriteLine kFloat16Rewrite = {
    [](const Plan& plan) { return plan.f16_io; },
    [](const Plan& front, int) {
      Plan plan = front;
      plan.bf16_io = takes_chunks(front);
      return plan;
    },
    1,
    [](const RewriteContext& context) -> std::unique_ptr<Rewrite> { return std::make_unique<StagedFloat16>(context); }};

StagedFloat16::StagedFloat16(const RewriteContext& context) : plan_(context.plan) {
  const Plan& plan = plan_;
  const bool chunk_form = context.kernels.front().device.chunk_form;
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

TokenTensor<float> StagedFloat16::rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const {
  return contiguous_rows(like, plan_.T, static_cast<char*>(workspace) + row.region.offset, row.bf16);
}

void StagedFloat16::add(const TokenTensor<float>& tensor, const TokenTensor<float>& rows, Float16Args& args) const {
  Float16Task& task = args.tasks[args.count++];
  task.f16.data = tensor.f16;
  task.f16.stride_b = tensor.stride_b, task.f16.stride_t = tensor.stride_t, task.f16.stride_h = tensor.stride_h;
  task.rows = token_arg(plan_, rows);
  task.heads = static_cast<int32_t>(tensor.heads);
  task.dim = static_cast<int32_t>(tensor.dim);
}

Float16Tokens StagedFloat16::tokens() const {
  return {plan_.tokens(), plan_.packed ? plan_.tokens() : plan_.T, token_end(plan_)};
}

Inputs<float> StagedFloat16::inputs(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  Float16Args args;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<float>& tensor = in.*kInputTokens<float>[i];
    if (tensor.f16 == nullptr) continue;
    made.*kInputTokens<float>[i] = rows_at(tensor, values_[i], workspace);
    add(tensor, made.*kInputTokens<float>[i], args);
  }
  from_float16(args, tokens(), plan_.stream);
  return made;
}

ForwardTensors StagedFloat16::open(const ForwardTensors& front, int, void* workspace) const {
  ForwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  if (front.out.o.f16 != nullptr) behind.out.o = rows_at(front.out.o, o_, workspace);
  return behind;
}

BackwardTensors StagedFloat16::open(const BackwardTensors& front, int, void* workspace) const {
  BackwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    TokenTensor<float>& tensor = behind.grads.*kInputTokens<float>[i];
    if (tensor.f16 != nullptr) tensor = rows_at(tensor, grads_[i], workspace);
  }
  if (front.d.o.f16 == nullptr) return behind;
  behind.d.o = rows_at(front.d.o, d_o_, workspace);
  Float16Args args;
  add(front.d.o, behind.d.o, args);
  from_float16(args, tokens(), plan_.stream);
  return behind;
}

void StagedFloat16::close(const ForwardTensors& front, const ForwardTensors& behind, void*) const {
  if (front.out.o.f16 == nullptr) return;
  Float16Args args;
  add(front.out.o, behind.out.o, args);
  to_float16(args, tokens(), plan_.stream);
}

void StagedFloat16::close(const BackwardTensors& front, const BackwardTensors& behind, void*) const {
  Float16Args args;
  for (const auto token : kInputTokens<float>) {
    const TokenTensor<float>& tensor = front.grads.*token;
    if (tensor.f16 != nullptr) add(tensor, behind.grads.*token, args);
  }
  to_float16(args, tokens(), plan_.stream);
}

}  // namespace fw::cuda
