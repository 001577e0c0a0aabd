// What a call does in words: the plan, and the pipelines of tensors such as the descriptor lets one expect
// (expected_traits()). Other memory may take other kernels: they are slower and compute the same.
#include <string>
#include <vector>

#include "base/error.h"
#include "rule/tokens.h"
#include "scan/cuda/device_plan.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/rewrites/gate_logits.h"
#include "scan/cuda/rewrites/split_k.h"

namespace fw::cuda {
namespace {

// The logits of which the scan's kernels make values, forward, or gradients, backward, themselves.
FusedGates fused_gates(const Plan& plan, const DevicePlan& device, bool backward) {
  return fused_in_kernels(plan, device, fused_activations(plan, device.chunk_form), expected_traits(plan, device),
                          backward, backward && device.saved.bytes > 0);
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

std::string kernels(const Plan& plan, const DevicePlan& device, bool backward, bool fused) {
  if (device.halves != nullptr)
    return fmt::format("twice: {}; gradients/sum_groups",
                       kernels(device.halves->plans[0], device.halves->devices[0], backward, fused));
  CallTraits traits = expected_traits(plan, device);
  traits.fused = fused;
  return to_string(backward ? plan_backward(traits, plan, device) : plan_forward(traits, plan, device));
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
  const FusedGates fused = may_form ? fused_gates(plan, device, false) : FusedGates{},
                   fused_backward = may_form ? fused_gates(plan, device, true) : FusedGates{};
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
                      kernels(plan, device, false, fused.any()), rows ? " -> dplr" : "", back,
                      front(makes_gates_again(plan, device, fused_backward)),
                      kernels(plan, device, true, fused_backward.any()), behind_scan,
                      behind || has_decay_logits(plan) ? " -> gates" : "", back);
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
