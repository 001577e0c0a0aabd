// What a call does in words: the plan, and the kernels that select.h chooses for tensors such as the descriptor lets
// one expect. Those are contiguous and of its io_dtype, but float32 where there is one scalar per head. (Other memory
// may take other kernels: they are slower and compute the same.)
#include <string>
#include <vector>

#include "base/error.h"
#include "rule/tokens.h"
#include "scan/cuda/call/gates.h"
#include "scan/cuda/call/grouped_heads.h"
#include "scan/cuda/call/plan.h"
#include "scan/cuda/call/select.h"
#include "scan/cuda/call/split_k.h"

namespace fw::cuda {
namespace {

// Addresses that nothing is read from: aligned as those of cudaMalloc.
template <class T = void>
T* somewhere() {
  constexpr uintptr_t kAligned = 1024;
  return reinterpret_cast<T*>(kAligned);  // NOLINT(performance-no-int-to-ptr)
}

TokenArg tensor(const Plan& plan, bool there, int64_t heads, int64_t dim, bool bf16) {
  TokenArg a;
  if (!there) return a;
  a.data = somewhere();
  a.stride_h = dim, a.stride_t = heads * dim, a.stride_b = plan.T * a.stride_t;
  a.bf16 = bf16 ? 1 : 0;
  a.divisor = static_cast<int32_t>(plan.HV / heads);
  return a;
}
// per_value_head: gradients of the key side as the kernels make them, which are float32 in the workspace where heads
// share a key head.
TokenArgs tensors(const Plan& plan, const DevicePlan& device, bool per_value_head) {
  constexpr TokenArg TokenArgs::*kMembers[] = {
#define FW_TOKEN(name, heads, width, used) &TokenArgs::name,
#include "rule/tokens.def"
  };
  TokenArgs a;
  const auto specs = token_specs(plan.rule);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenSpec& spec = specs[i];
    const bool key_row = spec.heads == TokenHeads::kKey && !spec.one();
    const int64_t heads = spec.heads != TokenHeads::kKey || (key_row && per_value_head) ? plan.HV : plan.H;
    const bool bf16 = plan.bf16_io && !spec.one() && (!key_row || heads == plan.H) &&
                      !(plan.f16_io && i == static_cast<size_t>(TokenIndex::g));
    a.*kMembers[i] = tensor(plan, spec.used, heads, spec.channels(plan.K, plan.V), bf16);
  }
  // Values made of logits, and what becomes gradients of logits.
  for (const GateSpec& gate : gate_specs(plan.rule, plan.gates)) {
    if (gate.logits()) (a.*kMembers[gate.token]).bf16 = bf16_values(plan, device.chunk_form, gate) ? 1 : 0;
  }
  return a;
}
StateArg state(const Plan& plan) {
  StateArg a;
  a.data = somewhere();
  const bool k_first = plan.state_layout == FW_STATE_K_FIRST;
  a.stride_h = plan.K * plan.V, a.stride_n = plan.HV * a.stride_h;
  a.stride_k = k_first ? plan.V : 1, a.stride_v = k_first ? 1 : plan.K;
  return a;
}
Problem expected_problem(const Plan& plan, const DevicePlan& device) {
  Problem x;
  x.rule = plan.rule;
  x.B = static_cast<int32_t>(plan.B), x.T = static_cast<int32_t>(plan.T), x.H = static_cast<int32_t>(plan.H),
  x.HV = static_cast<int32_t>(plan.HV);
  x.K = static_cast<int32_t>(plan.K), x.V = static_cast<int32_t>(plan.V), x.group = static_cast<int32_t>(plan.group());
  x.tokens = plan.tokens();
  x.sequences.N = static_cast<int32_t>(plan.N), x.sequences.T = x.T;
  if (plan.packed) x.sequences.offsets = somewhere<int32_t>();
  x.in = tensors(plan, device, false);
  x.initial_state = state(plan);
  if (device.saved.precond_rows.bytes > 0) x.precond_rows = somewhere<uint16_t>();
  return x;
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : " -> ") + name;
  return all;
}
void add_scan(std::vector<std::string>& names, const std::string& scan, const char* join, bool cut) {
  if (cut) names.insert(names.end(), {scan, join});
  names.push_back(scan);
}

const char* name_of(PrepareKernel kernel) {
  switch (kernel) {
    case PrepareKernel::kScalar:
      return "prepare/scalar";
    case PrepareKernel::kSums:
      return "prepare/sums";
    case PrepareKernel::kPrecond:
      return "prepare/precond";
    case PrepareKernel::kChannel:
      return "prepare/channel";
    case PrepareKernel::kChannelPlain:
      return "prepare/channel_plain";
    case PrepareKernel::kChannelHiLo:
      return "prepare/channel_hi_lo";
  }
  fail_internal("a kernel of prepare without a name");
}
std::string text_of(const PrepareChoice& choice) {
  const bool asks = choice.kernel == PrepareKernel::kScalar || choice.kernel == PrepareKernel::kChannel;
  return fmt::format("{}{}", name_of(choice.kernel),
                     asks ? choice.multiples ? " (raw rows)"
                            : choice.fetched ? " (streams)"
                                             : " (streams, rows not copied)"
                          : "");
}
const char* name_of(ScanForm form) {
  switch (form) {
    case ScanForm::kAdditive:
      return "scan/forward (additive)";
    case ScanForm::kChunkTiles:
      return "scan/forward (tiles)";
    case ScanForm::kApart:
      return "scan/forward (split tiles)";
    case ScanForm::kHiLo:
      return "scan/forward (hi_lo)";
    case ScanForm::kRows:
      return "scan/forward (raw rows)";
    case ScanForm::kPairs:
      return "scan/forward (raw rows, A and P)";
    case ScanForm::kSums:
      return "scan/forward (sums of raw rows, A and P)";
  }
  fail_internal("a form of the scan without a name");
}
const char* name_of(ScalarGain gain) {
  switch (gain) {
    case ScalarGain::kAny:
      return "any gain";
    case ScalarGain::kTied:
      return "gain by residual";
    case ScalarGain::kGate:
      return "gain a gate";
    case ScalarGain::kUnscaled:
      return "unscaled keys";
    case ScalarGain::kUnscaledDecays:
      return "unscaled keys, decays";
  }
  fail_internal("a form of a gain without a name");
}
std::string text_of(const GradientChoice& choice) {
  const char* const m = choice.m == RowM::kMade ? ", M made" : choice.m == RowM::kRead ? ", M read" : "";
  switch (choice.kernel) {
    case GradientKernel::kScalar:
      return fmt::format("gradients/scalar ({}{})", name_of(choice.gain), m);
    case GradientKernel::kGeneral:
      return fmt::format("gradients/general{}", choice.gain == ScalarGain::kUnscaled ? " (unscaled keys)" : "");
    case GradientKernel::kChannel:
      return fmt::format("gradients/channel ({}{})",
                         choice.gates     ? "gated streams"
                         : choice.own_key ? "streams, own erase key"
                         : choice.streams ? "streams"
                                          : "any rows",
                         m);
  }
  fail_internal("a gradient kernel without a name");
}

const char* of_k256(const Rule& rule) {
  const K256Form form = select_k256(rule);
  return form == K256Form::kSums ? " (sums)" : form == K256Form::kKeys ? " (keys)" : "";
}
const char* k256_gradients_of(const Rule& rule) {
  switch (select_k256(rule)) {
    case K256Form::kAdditive:
      return "k256/gradients";
    case K256Form::kRows:
      return gain_is_gate(rule) ? "k256/gradients" : "k256/gradients_gains";
    case K256Form::kSums:
      return "k256/gradients_sums";
    case K256Form::kKeys:
      return "k256/gradients_keys";
  }
  fail_internal("a form of K256 without a name");
}

std::string token_kernels(const Plan& plan, const Problem& problem, int sm_count) {
  TokenForwardArgs args;
  args.problem = problem;
  args.final_state = state(plan);
  if (plan.slots.tokens != nullptr) args.slots.tokens = somewhere<int32_t>();
  if (plan.slots.own != nullptr) args.slots.own = somewhere<int32_t>();
  args.slots.skips = plan.slots.skips ? 1 : 0;
  std::vector<std::string> names;
  const bool steps = !plan.packed && plan.T == 1 && plan.slots.tokens == nullptr && (plan.slots.skips || !plan.slots);
  if (plan.rule.uses_precond() && !steps) {
    names.emplace_back(plan.slots.tokens != nullptr ? "token/precond_tokens" : "precond/forward");
    args.problem.m = somewhere<float>();
  }
  const TokenChoice choice = select_token(args, sm_count);
  names.push_back(choice.kernel == TokenKernel::kHeads
                      ? fmt::format("token/forward (whole heads, blocks of a head {})", choice.parts)
                  : choice.kernel == TokenKernel::kStep
                      ? fmt::format("token/forward (few tokens, rows of a warp {})", choice.rows)
                      : fmt::format("token/forward (rows of a warp {})", choice.rows));
  return joined(names);
}

PrepareArgs expected_prepare(const DevicePlan& device, const Problem& problem) {
  PrepareArgs prepare;
  prepare.problem = problem;
  if (device.forward.z.bytes > 0) prepare.z = somewhere<uint16_t>();
  return prepare;
}

// The logits of which the scan's kernels make values, forward, or gradients, backward, themselves (as backend.cpp has
// it).
FusedGates forms(const Plan& plan, const DevicePlan& device, bool backward) {
  const Problem x = expected_problem(plan, device);
  PrepareArgs prepare = expected_prepare(device, x);
  if (device.forward.hi_lo.lo_parts.bytes > 0) prepare.forward_lo.lo_parts = somewhere<uint16_t>();
  return fused_in_kernels(plan, device, fused_activations(plan, device.chunk_form), prepare, backward ? &x.in : nullptr,
                          backward && device.saved.bytes > 0);
}
// Whether logits of numbers (or of channels) are among them.
bool fuses_any(const Plan& plan, const FusedGates& fused, bool numbers) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && is_fused(fused, spec) && token_specs(plan.rule)[spec.token].one() == numbers) return true;
  }
  return false;
}
// Whether gates are left that are logits and that they do not.
bool stores_gates(const Plan& plan, const FusedGates& fused) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && !is_fused(fused, spec)) return true;
  }
  return false;
}
// Whether backward makes values of logits once more: forward saves those of numbers, in the chunk form.
bool makes_gates_again(const Plan& plan, const DevicePlan& device, const FusedGates& fused) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const bool saved = device.chunk_form && token_specs(plan.rule)[spec.token].one();
    if (spec.logits() && !saved && !is_fused(fused, spec)) return true;
  }
  return false;
}
// Whether there are log-decays that are logits, whose a_log and dt_bias may want sums after backward.
bool has_decay_logits(const Plan& plan) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && spec.decay) return true;
  }
  return false;
}

std::string forward_kernels(const Plan& plan, const DevicePlan& device) {
  Problem x = expected_problem(plan, device);
  if (!device.chunk_form) return token_kernels(plan, x, device.sm_count);
  std::vector<std::string> names;
  const bool cut = static_cast<bool>(device.segments);
  if (device.direct) {
    add_scan(names, "additive/scan", "additive/join", cut);
    return joined(names);
  }
  if (device.k256) {
    const char* const of = of_k256(plan.rule);
    return fmt::format("k256/prepare{} -> k256/forward{}", select_k256(plan.rule) == K256Form::kKeys ? "_keys" : of,
                       of);
  }
  if (device.halves != nullptr)
    return fmt::format("twice: {}; gradients/sum_groups",
                       forward_kernels(device.halves->plans[0], device.halves->devices[0]));
  if (plan.rule.uses_precond()) {
    names.emplace_back("precond/forward");
    (prepare_makes_m(x, device.key) ? x.boundaries : x.m) = somewhere<float>();
  }
  PrepareArgs prepare = expected_prepare(device, x);
  if (device.forward.hi_lo.chunk_tiles.bytes > 0) prepare.forward_lo.chunk_tiles = somewhere();
  if (device.forward.hi_lo.lo_parts.bytes > 0) prepare.forward_lo.lo_parts = somewhere<uint16_t>();
  const PrepareChoice choice = select_prepare(prepare, device.key);
  const int heads = grouped_heads(prepare, choice, device.chunks, device.sm_count);
  names.push_back(heads > 1 ? fmt::format("prepare/grouped ({} value heads)", heads) : text_of(choice));
  ScanForwardArgs scan;
  scan.is_delta = plan.rule.is_delta();
  if (stores_k_hat(plan.rule)) scan.solved = somewhere();
  scan.hi_lo = prepare.forward_lo;
  if (scan_reads_intra_chunk(x, device.key, device.cut)) scan.pairs = somewhere<IntraChunk>();
  scan.mixed = mixed_streams(plan.rule);
  if (scan.pairs != nullptr || scan_reads_rows(x, device.key)) scan.rows = {x.in.q, x.in.k};
  add_scan(names, name_of(select_scan(scan)), "scan/join", cut);
  return joined(names);
}

std::string backward_kernels(const Plan& plan, const DevicePlan& device) {
  if (device.halves != nullptr)
    return fmt::format("twice: {}; gradients/sum_groups",
                       backward_kernels(device.halves->plans[0], device.halves->devices[0]));
  std::vector<std::string> names;
  GradientArgs args;
  args.problem = expected_problem(plan, device);
  args.d_o = args.problem.in.v;
  args.grads.d = tensors(plan, device, true);
  const bool precond = plan.rule.uses_precond();
  bool sums_heads = false;  // of q and k, which are all that are expected to have fewer heads
  if (device.direct) {
    add_scan(names, "additive/scan", "additive/join", device.segments.backward);
    names.emplace_back("additive/gradients");
  } else if (device.k256) {
    names.push_back(fmt::format("k256/reverse{}", of_k256(plan.rule)));
    names.push_back(fmt::format("{} (two halves)", k256_gradients_of(plan.rule)));
    names.emplace_back("k256/join");
  } else if (device.chunk_form) {
    if (precond) {
      if (gradients_make_m(args)) {
        args.precond.rows = somewhere<PrecondShare::Row>();
      } else {
        names.emplace_back("precond/forward");
        args.problem.m = somewhere<float>();
      }
    }
    add_scan(names,
             reverse_takes_rows(plan.rule) ? "scan/reverse_rows"
             : stores_k_hat(plan.rule)     ? "scan/reverse_rows (keys)"
                                           : "scan/reverse",
             "scan/join", device.segments.backward);
    sums_heads = device.backward.head_sums.bytes > 0 && gradients_sum_heads(args.problem);
    names.push_back(text_of(select_gradients(args)) + (sums_heads ? " (adds up heads)" : ""));
  } else {
    if (precond) names.emplace_back("precond/forward");
    names.emplace_back("token/backward");
  }
  if (plan.group() > 1 && !sums_heads) names.emplace_back("gradients/sum_groups");
  if (precond) names.emplace_back(args.precond.rows != nullptr ? "precond/backward (carry)" : "precond/backward");
  return joined(names);
}

}  // namespace

std::string to_text(const Plan& call, const Plan& plan, const DevicePlan& device, size_t forward_rows,
                    size_t backward_rows) {
  const char* const back = call.f16_io ? " -> float16" : "";
  std::string text =
      fmt::format("rule: {}\nsequences: {} of at most {} tokens, {}{} in all\n", to_string(call.rule), call.N,
                  call.longest, call.device_offsets != nullptr ? "offsets on the device, at most " : "", call.tokens());
  const bool rows = call.rule.general_erase();
  if (rows)
    text += fmt::format("rows: two a token, one that erases and one that writes, of {}\n", to_string(plan.rule));
  if (device.chunk_form) {
    const char* decay = plan.decay_kind() == DecayKind::kChannel  ? "channel"
                        : plan.decay_kind() == DecayKind::kScalar ? "scalar"
                                                                  : "none";
    text += fmt::format("form: chunk, {} chunks of {} tokens\n", device.chunks, kChunk);
    if (device.halves != nullptr) {
      text += fmt::format("keys: two calls of {} and {} channels, whose sums are rows of the workspace\n", kSplitK,
                          plan.K - kSplitK);
    } else if (device.direct) {
      text += fmt::format("scan: from the raw tensors, K tile {}, decay {}, grid {} x {}, value blocks of {}\n",
                          device.key, decay, plan.N * plan.HV, device.value_blocks, kValueBlock);
    } else {
      text += fmt::format("prepare: K tile {}, decay {}, {}, grid {} x {}\n", device.key, decay,
                          plan.rule.is_delta() ? "delta" : "additive", device.chunks, plan.HV);
      text += fmt::format("scan: grid {} x {}, value blocks of {}, {}\n", plan.N * plan.HV, device.value_blocks,
                          kValueBlock, device.z_tile ? "Z prepared" : "values scaled in the scan");
    }
    if (device.saved.hi_lo.chunk_tiles.bytes > 0) {
      text += fmt::format("operands: hi_lo (two bf16) where they reach the state, keys {}\n",
                          device.saved.hi_lo.lo_parts.bytes > 0 ? "too" : "as they are");
    }
    if (device.overlap_grad_with_scan) {
      text += fmt::format("gradients: beside the reverse scan of {} blocks, about {:.0f} us\n", device.reverse_blocks,
                          device.reverse_time);
    }
    if (device.segments) {
      text += fmt::format("segments: {} of {} chunks{}{}\n", device.segments.count(), device.segments.chunks,
                          device.segments.backward ? "" : ", forward only",
                          device.uses_decay_cutoff ? ", less where decays let nothing through" : "");
    }
  } else {
    text += fmt::format("form: token, {} sequences x {} value heads\n", plan.N, plan.HV);
  }
  if (call.checkpoints.interval > 0) text += fmt::format("checkpoints: every {} tokens\n", call.checkpoints.interval);
  const bool divides = call.rule.can_divide_erase_gate();
  const bool may_form = !rows && !divides && call.rule.uses_k();  // these are made of values
  const FusedGates fused = may_form ? forms(plan, device, false) : FusedGates{},
                   fused_backward = may_form ? forms(plan, device, true) : FusedGates{};
  if (fused.any() && !device.chunk_form) text += "logits: values made with the token\n";
  if (device.chunk_form && fuses_any(plan, fused, false))
    text += fmt::format("logits of channels: values made in prepare{}\n",
                        fuses_any(plan, fused_backward, false) ? ", values and gradients in gradients" : "");
  if (device.chunk_form && fuses_any(plan, fused_backward, true))
    text += fmt::format("logits of token scalars: {}gradients made in gradients\n",
                        fuses_any(plan, fused, true) ? "values made in prepare, " : "");
  const auto front = [&](bool gates) {
    return fmt::format("{}{}{}{}", call.f16_io ? "float16 -> " : "", gates ? "gates -> " : "",
                       divides ? "erase_over_decay -> " : "", rows ? "dplr -> " : "");
  };
  const bool behind = stores_gates(plan, fused_backward);
  const char* const behind_scan = rows ? " -> dplr" : divides ? " -> erase_over_decay" : "";
  text += fmt::format("kernels forward: {}{}{}{}\nkernels backward: {}{}{}{}{}\n", front(stores_gates(plan, fused)),
                      forward_kernels(plan, device), rows ? " -> dplr" : "", back,
                      front(makes_gates_again(plan, device, fused_backward)), backward_kernels(plan, device),
                      behind_scan, behind || has_decay_logits(plan) ? " -> gates" : "", back);
  text += fmt::format(
      "workspace forward: {} bytes\nworkspace backward: {} bytes\nsaved: {} bytes\nworkspace backward without saved: "
      "{} bytes\n"
      "workspace forward that saves: {} bytes\n",
      forward_rows + device.forward.bytes, backward_rows + device.backward.bytes,
      CallGates(call, device.chunk_form, device.chunks).saved_with(device.saved.bytes),
      backward_rows + device.backward_alone_bytes(), forward_rows + device.forward.saving_bytes);
  return text;
}

}  // namespace fw::cuda
