#include "scan/cuda/rewrites/dplr_as_two_tokens.h"

#include "base/error.h"
#include "scan/backend.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

// Of the token form and of the chunk form: above what its kernels bound decays of single tokens at, exp(-10) in prepare
// and 2^-13 in the gradients.
constexpr float kLeastOfTokens = -40, kLeastOfChunks = -9;

// The rule of the rows: row 2t has p / alpha as its erase key and f as its key.
Plan plan_of_rows(const Plan& tokens) {
  const auto refuse = [&](const char* what, const char* expected) {
    fail_usage("descriptor: {}: expected {} on CUDA with erase_state=previous or erase_write=own, got the rule '{}'",
               what, expected, to_string(tokens.rule));
  };
  if (tokens.device_offsets != nullptr) refuse("seqlens.cu_seqlens", "offsets in the host's memory");
  if (tokens.ring && tokens.slots.skips) refuse("ring.tokens", "0");
  const int64_t most = cuda_backend().most_tokens / 2;
  if (tokens.tokens() > most) {
    fail_usage(
        "descriptor: T: expected at most {} tokens in all on CUDA with erase_state=previous or erase_write=own, got {}",
        most, tokens.tokens());
  }
  Plan plan = tokens;
  plan.rule.erase_state = EraseState::kDecayed;
  plan.rule.erase_write = EraseWrite::kTied;
  plan.rule.erase_key = EraseKey::kOwn;
  plan.T *= 2;
  if (plan.segment > 0) plan.segment *= 2;
  plan.longest *= 2;
  plan.longest_token_form = plan.longest;
  plan.checkpoints.interval *= 2;  // at the same tokens
  plan.slots.token_rows = 2;
  for (int64_t& offset : plan.offsets) offset *= 2;
  for (int64_t n = 0; plan.packed && n < plan.N; ++n) {
    int64_t& next = plan.chunk_base[static_cast<size_t>(n) + 1];
    next = plan.chunk_base[static_cast<size_t>(n)] + plan.chunks(n);
  }
  return plan;
}

bool is(size_t i, TokenIndex token) { return i == static_cast<size_t>(token); }

}  // namespace

const char* dplr_as_two_tokens_lacks(const Rule& rule, int64_t H, int64_t HV) {
  if (!rule.general_erase()) return nullptr;
  if (rule.decay == Decay::kConstant)
    return "a decay that is a tensor, or none with erase_state=previous or erase_write=own";
  if (!rule.uses_k()) return "key_source=given with erase_state=previous or erase_write=own";
  if (rule.k_norm != Norm::kRaw) return "k_norm=raw with erase_state=previous or erase_write=own";
  if (rule.gain != Gain::kOne && rule.gain != Gain::kGate)
    return "gain=one or gate with erase_state=previous or erase_write=own";
  if (rule.feedback != Feedback::kNone) return "feedback=none with erase_state=previous or erase_write=own";
  if (rule.uses_precond()) return "precond=none with erase_state=previous or erase_write=own";
  if (H != HV) return "as many key heads as value heads with erase_state=previous or erase_write=own";
  return nullptr;
}

const RewriteLine kDplrAsTwoTokensRewrite = {[](const Plan& plan) { return plan.rule.general_erase(); },
                                             [](const Plan& front, int) { return plan_of_rows(front); }, 1,
                                             [](const RewriteContext& context) -> std::unique_ptr<Rewrite> {
                                               return std::make_unique<DplrAsTwoTokens>(context);
                                             }};

DplrAsTwoTokens::DplrAsTwoTokens(const RewriteContext& context)
    : plan_(context.plan), rows_(*context.kernels.front().plan), before_decay_(plan_.rule.erases_before_decay()) {
  const Plan& plan = plan_;
  least_ = context.kernels.front().device.chunk_form ? kLeastOfChunks : kLeastOfTokens;
  constexpr size_t kAlign = 1024;
  const auto take = [](size_t& used, int64_t numbers) {
    const Region region{used, static_cast<size_t>(numbers) * sizeof(float)};
    used += (region.bytes + kAlign - 1) / kAlign * kAlign;
    return region;
  };
  const auto specs = token_specs(rows_.rule);
  const auto numbers = [&](size_t i) { return rows_.tokens() * plan.HV * specs[i].channels(plan.K, plan.V); };
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (specs[i].used) values_[i] = take(forward_bytes_, numbers(i));
  }
  backward_bytes_ = forward_bytes_;
  o_ = take(forward_bytes_, rows_.tokens() * plan.HV * plan.V);
  d_o_ = take(backward_bytes_, rows_.tokens() * plan.HV * plan.V);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (specs[i].used) grads_[i] = take(backward_bytes_, numbers(i));
  }
}

// Of the type of `like`.
TokenTensor<float> DplrAsTwoTokens::rows_at(const TokenTensor<float>& like, const Region& region,
                                            void* workspace) const {
  return contiguous_rows(like, rows_.T, static_cast<char*>(workspace) + region.offset, like.bf16 != nullptr);
}

RowTokens DplrAsTwoTokens::tokens() const {
  return {plan_.tokens(), plan_.packed ? plan_.tokens() : plan_.T, static_cast<int32_t>(plan_.HV)};
}

Inputs<float> DplrAsTwoTokens::inputs(const Inputs<float>& in, void* workspace) const {
  Inputs<float> made = in;
  made.erase_write = {};
  ExpandArgs args;
  args.least = least_;
  const auto specs = token_specs(rows_.rule);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (!specs[i].used) continue;
    const bool erases = is(i, TokenIndex::erase_key);
    const TokenTensor<float>& from = erases && !in.erase_key ? in.k : in.*kInputTokens<float>[i];
    TokenTensor<float>& to = made.*kInputTokens<float>[i];
    to = rows_at(from, values_[i], workspace);
    ExpandTask& task = args.tasks[args.count++];
    task.from = token_arg(plan_, from);
    task.to = token_arg(plan_, to);
    task.heads = static_cast<int32_t>(from.heads);
    task.dim = static_cast<int32_t>(from.dim);
    if (is(i, TokenIndex::k)) {
      task.kind = RowsOf::kPair;
      task.other = token_arg(plan_, in.erase_write ? in.erase_write : in.k);
    } else if (erases) {
      task.kind = RowsOf::kErase;
      if (before_decay_) task.other = token_arg(plan_, in.g), task.other_dim = static_cast<int32_t>(in.g.dim);
    } else if (is(i, TokenIndex::g)) {
      task.kind = before_decay_ ? RowsOf::kDecay : RowsOf::kFirst;
    } else if (is(i, TokenIndex::v)) {
      task.kind = RowsOf::kSecond;
    }
  }
  expand_rows(args, tokens(), plan_.stream);
  return made;
}

void DplrAsTwoTokens::expand_second(const TokenTensor<float>& from, const TokenTensor<float>& to) const {
  ExpandArgs args;
  ExpandTask& task = args.tasks[args.count++];
  task.kind = RowsOf::kSecond;
  task.from = token_arg(plan_, from);
  task.to = token_arg(plan_, to);
  task.heads = static_cast<int32_t>(from.heads);
  task.dim = static_cast<int32_t>(from.dim);
  expand_rows(args, tokens(), plan_.stream);
}

ForwardTensors DplrAsTwoTokens::open(const ForwardTensors& front, int, void* workspace) const {
  ForwardTensors behind = front;
  behind.in = inputs(front.in, workspace);
  if (!front.out.o) return behind;
  behind.out.o = rows_at(front.out.o, o_, workspace);
  if (plan_.slots.keeps_outputs()) expand_second(front.out.o, behind.out.o);
  return behind;
}

void DplrAsTwoTokens::close(const ForwardTensors& front, const ForwardTensors& behind, void*) const {
  const TokenTensor<float>& o = front.out.o;
  if (!o) return;
  ReduceRowsArgs args;
  JoinTask& task = args.tasks[args.count++];
  task.second = 1;
  task.rows = token_arg(plan_, behind.out.o);
  task.to = token_arg(plan_, o);
  task.heads = static_cast<int32_t>(o.heads);
  task.dim = static_cast<int32_t>(o.dim);
  reduce_rows(args, tokens(), plan_.stream);
}

BackwardTensors DplrAsTwoTokens::open(const BackwardTensors& front, int, void* workspace) const {
  BackwardTensors behind = front;
  behind.grads = gradients(front.in, front.grads, workspace);
  behind.in = inputs(front.in, workspace);
  if (front.d.o) {
    behind.d.o = rows_at(front.d.o, d_o_, workspace);
    expand_second(front.d.o, behind.d.o);
  }
  return behind;
}

std::string DplrAsTwoTokens::lines() const {
  return fmt::format("rows: two a token, one that erases and one that writes, of {}\n", to_string(rows_.rule));
}

// All that the caller's depend on: of the erase vector's and the decay's also the rows of the erase key.
Inputs<float> DplrAsTwoTokens::gradients(const Inputs<float>& in, const Inputs<float>& wanted, void* workspace) const {
  Inputs<float> opened = wanted;
  opened.erase_write = {};
  const auto specs = token_specs(rows_.rule);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (!specs[i].used) continue;
    TokenTensor<float>& to = opened.*kInputTokens<float>[i];
    const TokenTensor<float>& own = wanted.*kInputTokens<float>[i];
    const bool of_key = is(i, TokenIndex::k) && wanted.erase_write;
    const bool of_erase = is(i, TokenIndex::erase_key) && ((before_decay_ && wanted.g) || (!in.erase_key && wanted.k));
    if (!own && !of_key && !of_erase) continue;
    to = rows_at(own ? own : of_key ? wanted.erase_write : in.erase_key ? in.erase_key : in.k, grads_[i], workspace);
  }
  return opened;
}

void DplrAsTwoTokens::close(const BackwardTensors& front, const BackwardTensors& behind, void*) const {
  const Inputs<float>&in = front.in, &wanted = front.grads, &opened = behind.grads;
  ReduceRowsArgs args;
  args.least = least_;
  const auto add = [&](const TokenTensor<float>& rows, const TokenTensor<float>& to, float first,
                       float second) -> JoinTask& {
    JoinTask& task = args.tasks[args.count++];
    task.first = first, task.second = second;
    task.rows = token_arg(plan_, rows);
    task.to = token_arg(plan_, to);
    task.heads = static_cast<int32_t>(to.heads);
    task.dim = static_cast<int32_t>(to.dim);
    return task;
  };
  const auto erases = [&](JoinTask& task, RowsBack kind) {
    task.kind = kind;
    task.erased = token_arg(plan_, opened.erase_key);
    task.key_dim = static_cast<int32_t>(plan_.K);
    task.p = token_arg(plan_, in.erase_key ? in.erase_key : in.k);
    if (before_decay_) task.g = token_arg(plan_, in.g), task.g_dim = static_cast<int32_t>(in.g.dim);
  };
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenTensor<float>& to = wanted.*kInputTokens<float>[i];
    const TokenTensor<float>& rows = opened.*kInputTokens<float>[i];
    if (!to) continue;
    if (is(i, TokenIndex::erase_write)) {
      add(opened.k, to, 1, 0);
    } else if (is(i, TokenIndex::erase_key)) {
      erases(add({}, to, 0, 0), RowsBack::kErase);
    } else if (is(i, TokenIndex::k)) {
      JoinTask& task = add(rows, to, in.erase_write ? 0.0f : 1.0f, 1);
      if (!in.erase_key) erases(task, RowsBack::kErase);
    } else if (is(i, TokenIndex::g)) {
      JoinTask& task = add(rows, to, 1, 0);
      if (before_decay_) erases(task, RowsBack::kDecay);
    } else if (is(i, TokenIndex::q) || is(i, TokenIndex::v)) {
      add(rows, to, 0, 1);
    } else {
      add(rows, to, 1, 1);
    }
  }
  reduce_rows(args, tokens(), plan_.stream);
}

}  // namespace fw::cuda
