// What tests of device code share: problems of bf16 values, bounds, runs on the device.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "gpu/device.h"
#include "reference/fields.h"
#include "reference/rounded.h"
#include "rule/gates.h"
#include "rule/rule.h"
#include "rule/tokens.h"
#include "scan/backend.h"
#include "support/recurrence.h"
#ifdef FW_CUDA_EMULATION
#include "emulation/gpu.h"
#endif

namespace fw::testing {

// The emulation is thousands of times slower than the device: tests of many shapes take every kth of them.
inline bool emulated() { return device_info().emulated; }

// While it lives, the emulated device has so many SMs: calls of few sequences fill it. Nothing on a GPU.
class EmulatedSms {
 public:
#ifdef FW_CUDA_EMULATION
  explicit EmulatedSms(int count) : before_(std::exchange(cuda::emulation::gpu.sm_count, count)) {}
  ~EmulatedSms() { cuda::emulation::gpu.sm_count = before_; }
#else
  explicit EmulatedSms(int) {}
  ~EmulatedSms() = default;
#endif
  EmulatedSms(const EmulatedSms&) = delete;
  EmulatedSms& operator=(const EmulatedSms&) = delete;

#ifdef FW_CUDA_EMULATION
 private:
  int before_;
#endif
};

// Of rules with as many key heads as value heads: what two rows a token (scan/cuda/rewrites/dplr_as_two_tokens.h)
// cannot say.
inline bool lacks(const Rule& rule) { return cuda_backend().lacks(rule, 2, 2) != nullptr; }

inline bool on_hopper() { return cuda::current_arch() == cuda::Arch::kSm90; }

// The chunk form: where a GPU has it for some rules alone (sm80/), the others take the token form.
inline HeaderRun device_run(fw_form form) {
  HeaderRun run;
  run.device = FW_DEVICE_CUDA;
  run.dtype = FW_F32;
  run.form = form == FW_FORM_CHUNK && !on_hopper() ? FW_FORM_AUTO : form;
  run.bf16_operands = form == FW_FORM_CHUNK;
  return run;
}

// What a call of the chunk form does, in words (scan/cuda/call/text.cpp), for one with such bf16 tensors of B sequences
// of T tokens.
inline std::string text_of_call(const Problem& problem, int64_t B, int64_t T) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.rule = to_c(problem.rule);
  desc.gates = to_c(problem.shape.gates);
  desc.dtype = FW_F32, desc.io_dtype = desc.operands = FW_BF16;
  desc.device = FW_DEVICE_CUDA, desc.form = FW_FORM_CHUNK;
  desc.B = B, desc.T = T;
  desc.H = problem.shape.H, desc.HV = problem.shape.HV, desc.K = problem.shape.K, desc.V = problem.shape.V;
  std::string text(fw_plan_text(&desc, nullptr, 0) + 1, '\0');
  text.resize(fw_plan_text(&desc, text.data(), text.size()));
  return text;
}

// The plan's text of a call whose forward is one kernel (scan/cuda/sm90/fused).
inline bool is_fused(const std::string& text) { return text.find("fused/forward\n") != std::string::npos; }

// Log-decays of a hundredth of what was drawn: chunks that hardly decay have a form of their own of their gradient
// (NoDecayState, gradients/phases.cuh).
inline void hardly_decay(Problem& p) {
  for (double& x : p.in.g) x *= 0.01;
}

// float32 arithmetic, one token at a time.
inline constexpr double kTokenBound = 2e-5;
inline constexpr double kTokenFloor = 1e-3;
// Products of bf16 operands with float32 sums: relative L2 errors of outputs and states, and of gradients. A gradient
// that is a small part of the whole (the preconditioner's gates) is measured against a hundredth of it.
struct ChunkBounds {
  double output = 6e-3, gradient = 1e-2;
  double scalar_gradient = 1e-2;  // of gradients with one value a token: sums of K V products that cancel
  double few_scalars = 1.5e-2;    // of fewer than kFewScalars of them: there chance does not even out
};
// Of the log-decay where decays are strong.
inline constexpr double kStrongDecay = 2e-2;
inline constexpr size_t kFewScalars = 512;
inline constexpr double kChunkFloor = 1e-2;

inline bool one_value_a_token(const std::string& field, const Rule& rule) {
  if (field == "erase_gate") return rule.erase != Gate::kChannel;  // of the mean of a gate too
  if (field == "write_gate") return rule.write != Gate::kChannel;
  for (const TokenSpec& spec : token_specs(rule)) {
    if (field == spec.name) return spec.one();
  }
  return false;
}

inline size_t values_of(const std::string& field, const ReferenceInputs& inputs) {
  for (const auto& f : reference_input_fields()) {
    if (field == f.name) return (inputs.*f.values).size();
  }
  return 0;
}

inline double gradient_bound(const std::string& field, const ReferenceInputs& expected, const Rule& rule,
                             bool strong_decay, const ChunkBounds& bounds) {
  if (strong_decay && field == "g") return kStrongDecay;
  if (!one_value_a_token(field, rule)) return bounds.gradient;
  return values_of(field, expected) < kFewScalars ? bounds.few_scalars : bounds.scalar_gradient;
}

inline ::testing::AssertionResult close_gradients(const ReferenceInputs& got, const ReferenceInputs& expected,
                                                  const Rule& rule, bool strong_decay, const ChunkBounds& bounds = {}) {
  std::string text;
  for (const FieldError& e : compare(got, expected, kChunkFloor)) {
    const double bound = gradient_bound(e.name, expected, rule, strong_decay, bounds);
    if (!(e.error <= bound)) text += fmt::format(" {}: {:.3g} > {}", e.name, e.error, bound);
  }
  if (text.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "relative errors:" << text;
}

// A bound conditioned on the data: gradients with one value a token are sums that may cancel, and then every arithmetic
// is that much farther from the reference. What float32 loses, one token at a time, measures it: bf16 operands may lose
// 2^16 times as much, the ratio of the two unit roundoffs (measured over 80 problems of three rules: at most 2^15.4
// times). It is never more than kCancelled, and float32 itself keeps its own bound.
inline constexpr double kBf16OfFloat = 65536;
inline constexpr double kCancelled = 5e-2;

inline ::testing::AssertionResult close_conditioned(const Problem& problem, const ReferenceInputs& got,
                                                    const ReferenceInputs& expected, bool strong_decay,
                                                    ChunkBounds bounds = {}) {
  const ::testing::AssertionResult unconditioned = close_gradients(got, expected, problem.rule, strong_decay, bounds);
  if (unconditioned) return unconditioned;
  const ReferenceInputs in_float = header_backward(problem, device_run(FW_FORM_TOKEN));
  if (const ::testing::AssertionResult float32 = close(in_float, expected, kTokenBound, kTokenFloor); !float32)
    return float32;
  std::string text;
  const std::vector<FieldError> errors = compare(got, expected, kChunkFloor),
                                lost = compare(in_float, expected, kChunkFloor);
  for (size_t i = 0; i < errors.size(); ++i) {
    double bound = gradient_bound(errors[i].name, expected, problem.rule, strong_decay, bounds);
    if (one_value_a_token(errors[i].name, problem.rule))
      bound = std::max(bound, std::min(kBf16OfFloat * lost[i].error, kCancelled));
    if (!(errors[i].error <= bound))
      text +=
          fmt::format(" {}: {:.3g} > {:.3g} (float32: {:.3g})", errors[i].name, errors[i].error, bound, lost[i].error);
  }
  if (text.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "relative errors:" << text;
}

}  // namespace fw::testing
