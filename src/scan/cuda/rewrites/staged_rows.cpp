#include "scan/cuda/rewrites/staged_rows.h"

#include <fmt/format.h>

#include "scan/cuda/rule_traits.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {

namespace {

// float32 tensors whose rows are whole vectors as bf16: others gain nothing by being bf16. With steps above 1 errors of
// keys may grow from token to token, and kernels take the lo parts of float32 keys (LoTiles).
bool stages_f32(const Plan& plan) {
  return !plan.bf16_io && !plan.f16_io && takes_chunks(plan) && plan.K % 8 == 0 && plan.V % 8 == 0 &&
         !uses_hi_lo(plan.rule);
}

}  // namespace

const RewriteLine kStagedRowsRewrite = {
    [](const Plan& plan) { return plan.f16_io || stages_f32(plan); },
    [](const Plan& front, int) {
      Plan plan = front;
      plan.bf16_io = takes_chunks(front);
      plan.f32_gates = true;
      return plan;
    },
    1, [](const RewriteContext& context) -> std::unique_ptr<Rewrite> { return std::make_unique<StagedRows>(context); }};

StagedRows::StagedRows(const RewriteContext& context) : plan_(context.plan) {
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
  // float32 tensors that would be float32 rows stay where they are.
  const auto wanted = [&](size_t i) { return specs[i].used && (plan.f16_io || bf16(i)); };
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (wanted(i)) values_[i] = take(forward_bytes_, numbers(i), bf16(i));
  }
  backward_bytes_ = forward_bytes_;
  const int64_t out = plan.tokens() * plan.HV * plan.V;
  o_ = take(forward_bytes_, out, chunk_form);
  d_o_ = take(backward_bytes_, out, chunk_form);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (wanted(i)) grads_[i] = take(backward_bytes_, numbers(i), bf16(i));
  }
}

bool StagedRows::stages(const TokenTensor<float>& tensor, const Row& row) const {
  return tensor.f16 != nullptr || (tensor.data != nullptr && row.bf16);
}

TokenTensor<float> StagedRows::rows_at(const TokenTensor<float>& like, const Row& row, void* workspace) const {
  return contiguous_rows(like, plan_.T, static_cast<char*>(workspace) + row.region.offset, row.bf16);
}

void StagedRows::add(const TokenTensor<float>& tensor, const TokenTensor<float>& rows, StageArgs& args) const {
  StageTask& task = args.tasks[args.count++];
  task.caller_f32 = tensor.f16 == nullptr ? 1 : 0;
  task.caller.data = tensor.f16 != nullptr ? static_cast<void*>(tensor.f16) : static_cast<void*>(tensor.data);
  task.caller.stride_b = tensor.stride_b, task.caller.stride_t = tensor.stride_t,
  task.caller.stride_h = tensor.stride_h;
  task.rows = token_arg(plan_, rows);
  task.heads = static_cast<int32_t>(tensor.heads);
  task.dim = static_cast<int32_t>(tensor.dim);
}

std::string StagedRows::lines() const {
  return fmt::format("staged: {} tensors, as rows of {}\n", plan_.f16_io ? "float16" : "float32",
                     o_.bf16 ? "bf16" : "float32");
}

StageTokens StagedRows::tokens() const {
  return {plan_.tokens(), plan_.packed ? plan_.tokens() : plan_.T, token_end(plan_)};
}

Inputs<float> StagedRows::inputs(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  StageArgs args;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<float>& tensor = in.*kInputTokens<float>[i];
    if (!stages(tensor, values_[i])) continue;
    made.*kInputTokens<float>[i] = rows_at(tensor, values_[i], workspace);
    add(tensor, made.*kInputTokens<float>[i], args);
  }
  stage_rows(args, tokens(), plan_.stream);
  return made;
}

ForwardTensors StagedRows::open(const ForwardTensors& front, int, void* workspace) const {
  ForwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  if (!stages(front.out.o, o_)) return behind;
  behind.out.o = rows_at(front.out.o, o_, workspace);
  if (!plan_.slots.keeps_outputs()) return behind;
  StageArgs args;
  add(front.out.o, behind.out.o, args);
  stage_rows(args, tokens(), plan_.stream);
  return behind;
}

BackwardTensors StagedRows::open(const BackwardTensors& front, int, void* workspace) const {
  BackwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    TokenTensor<float>& tensor = behind.grads.*kInputTokens<float>[i];
    if (stages(tensor, grads_[i])) tensor = rows_at(tensor, grads_[i], workspace);
  }
  if (!stages(front.d.o, d_o_)) return behind;
  behind.d.o = rows_at(front.d.o, d_o_, workspace);
  StageArgs args;
  add(front.d.o, behind.d.o, args);
  stage_rows(args, tokens(), plan_.stream);
  return behind;
}

void StagedRows::close(const ForwardTensors& front, const ForwardTensors& behind, void*) const {
  if (!stages(front.out.o, o_)) return;
  StageArgs args;
  add(front.out.o, behind.out.o, args);
  unstage_rows(args, tokens(), plan_.stream);
}

void StagedRows::close(const BackwardTensors& front, const BackwardTensors& behind, void*) const {
  StageArgs args;
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const auto token = kInputTokens<float>[i];
    const TokenTensor<float>& tensor = front.grads.*token;
    if (stages(tensor, grads_[i])) add(tensor, behind.grads.*token, args);
  }
  unstage_rows(args, tokens(), plan_.stream);
}

}  // namespace fw::cuda
