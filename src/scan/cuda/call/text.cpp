// What a call does in words: the plan, and the pipelines of tensors such as the descriptor lets one expect
// (expected_traits()). Other memory may take other kernels: they are slower and compute the same.
#include <algorithm>
#include <string>

#include "base/error.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {
namespace {

// All kernels of a direction, in order.
std::string kernels(const RewrittenCall& call, bool backward) {
  const auto& [plan, device] = call.kernels().front();
  const Forms forms = forms_of(device.arch);
  if (!(device.chunk_form ? forms.chunk : forms.token)) return "none on this GPU (fw_device_check)";
  CallTraits traits = expected_traits(*plan, device);
  std::string before, after;
  for (const auto& rewrite : call.rewrites()) {
    before += rewrite->before(backward);
    after.insert(0, rewrite->after(backward));
    traits.fused = traits.fused || rewrite->fuses(backward);
  }
  if (call.plan().ring && !call.plan().slots.skips && !backward) before.insert(0, "token/ring_fold -> ");
  return before + to_string(backward ? plan_backward(traits, *plan, device) : plan_forward(traits, *plan, device)) +
         after;
}

// What fw_step of the same descriptor runs where it has a ring; a forward call folds first.
std::string ring_lines(const RewrittenCall& call) {
  const auto& [plan, device] = call.kernels().front();
  if (!call.plan().ring) return {};
  CallTraits traits = expected_traits(*plan, device);
  traits.ring = true, traits.starts = false;
  return fmt::format("{}kernel of a step: {}\n", ring_text(call.plan()), name_of(select_token(traits)));
}

std::string chunk_lines(const Plan& plan, const DevicePlan& device) {
  const char* decay = plan.decay_kind() == DecayKind::kChannel  ? "channel"
                      : plan.decay_kind() == DecayKind::kScalar ? "scalar"
                                                                : "none";
  std::string text = fmt::format("form: chunk, {} chunks of {} tokens\n", device.chunks, kChunk);
  if (device.direct) {
    text += fmt::format("scan: from the raw tensors, K tile {}, decay {}, grid {} x {}, value blocks of {}\n",
                        device.k_tile, decay, plan.N * plan.HV, device.value_blocks, kValueBlock);
  } else {
    text += fmt::format("prepare: K tile {}, decay {}, {}, grid {} x {}\n", device.k_tile, decay,
                        plan.rule.is_delta() ? "delta" : "additive", device.chunks, plan.HV);
    text += fmt::format("scan: grid {} x {}, value blocks of {}, {}\n", plan.N * plan.HV, device.value_blocks,
                        kValueBlock, device.z_tile ? "Z prepared" : "values scaled in the scan");
  }
  if (device.fused_forward) {
    CallTraits traits = expected_traits(plan, device);
    traits.one_kernel = false;
    text += fmt::format("fused forward: grid {}, where nothing is saved; else {}\n", plan.N * plan.HV,
                        to_string(plan_forward(traits, plan, device)));
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
  return text;
}

}  // namespace

size_t forward_bytes(const RewrittenCall& call, const RewrittenCall* token) {
  return token != nullptr ? std::max(token->forward_bytes(), call.forward_saving_bytes()) : call.forward_bytes();
}

std::string to_text(const RewrittenCall& call, const RewrittenCall* token) {
  const Plan& own = call.plan();
  const auto& [plan, device] = call.kernels().front();
  std::string text =
      fmt::format("rule: {}\nsequences: {} of at most {} tokens, {}{} in all\n", to_string(own.rule), own.N,
                  own.longest, own.device_offsets != nullptr ? "offsets on the device, at most " : "", own.tokens());
  if (own.form == FW_FORM_DECODE) {
    text += fmt::format("form: decode: forward by the token form, backward {}\n",
                        token != nullptr ? "in chunks, as below" : "too, since it takes no chunks");
  }
  text += device.chunk_form ? chunk_lines(*plan, device)
                            : fmt::format("form: token, {} sequences x {} value heads\n", plan->N, plan->HV);
  for (const auto& rewrite : call.rewrites()) text += rewrite->lines();
  text += ring_lines(call);
  if (own.checkpoints.interval > 0) text += fmt::format("checkpoints: every {} tokens\n", own.checkpoints.interval);
  if (token != nullptr) {
    text += fmt::format("kernels forward: {}; where it saves, also {}\n", kernels(*token, false), kernels(call, false));
  } else {
    text += fmt::format("kernels forward: {}\n", kernels(call, false));
  }
  text += fmt::format("kernels backward: {}\n", kernels(call, true));
  text += fmt::format(
      "workspace forward: {} bytes\nworkspace backward: {} bytes\nsaved: {} bytes\nworkspace backward without saved: "
      "{} bytes\n"
      "workspace forward that saves: {} bytes\n",
      forward_bytes(call, token), call.backward_bytes(), call.saved_bytes(), call.backward_alone_bytes(),
      token != nullptr ? forward_bytes(call, token) : call.forward_saving_bytes());
  return text;
}

}  // namespace fw::cuda
