// The choice of kernels as a value: traits of a call's tensors, and the pipelines that are planned from them.
#include "scan/cuda/pipeline.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "fastweight/fastweight.h"
#include "scan/backend.h"
#include "scan/cuda/rewrites/rewrite.h"
#include "scan/cuda/rule_traits.h"
#include "scan/cuda/token_arg.h"
#include "support/recurrence.h"

namespace fw::cuda {
namespace {

struct Shape {
  int64_t B = 2, T = 130, H = 2, HV = 2, K = 128, V = 128;
  bool bf16 = true;
};

Plan plan_of(const Rule& rule, const Shape& shape) {
  Plan plan;
  plan.rule = rule;
  plan.B = plan.N = shape.B, plan.T = plan.longest = shape.T;
  plan.H = shape.H, plan.HV = shape.HV, plan.K = shape.K, plan.V = shape.V;
  plan.bf16_io = shape.bf16;
  plan.bf16_operands = true;
  plan.segment = -1;
  plan.state_layout = FW_STATE_V_FIRST;
  return plan;
}

// Contiguous tensors at an address that cudaMalloc could have given.
TokenArgs contiguous(const Plan& plan, bool gradients) {
  TokenArgs all;
  const auto specs = token_specs(plan.rule);
  constexpr TokenArg TokenArgs::*kArgs[] = {
#define FW_TOKEN(name, heads, width, used) &TokenArgs::name,
#include "rule/tokens.def"
  };
  alignas(1024) static char memory[1024];
  for (size_t i = 0; i < kTokenTensors; ++i) {
    if (!specs[i].used) continue;
    const bool key_row = specs[i].heads == TokenHeads::kKey && !specs[i].one();
    const int64_t heads = specs[i].heads == TokenHeads::kKey && !(key_row && gradients) ? plan.H : plan.HV,
                  dim = specs[i].channels(plan.K, plan.V);
    TokenArg& a = all.*kArgs[i];
    a.data = memory;
    a.bf16 = plan.bf16_io && !specs[i].one() && !(key_row && gradients && plan.H != plan.HV) ? 1 : 0;
    a.stride_h = dim, a.stride_t = heads * dim, a.stride_b = plan.T * a.stride_t;
    a.divisor = static_cast<int32_t>(plan.HV / heads);
  }
  return all;
}

StateArg contiguous_state(const Plan& plan) {
  alignas(1024) static char memory[1024];
  StateArg a;
  a.data = memory;
  const bool k_first = plan.state_layout == FW_STATE_K_FIRST;
  a.stride_k = k_first ? plan.V : 1, a.stride_v = k_first ? 1 : plan.K;
  a.stride_h = plan.K * plan.V, a.stride_n = plan.HV * a.stride_h;
  return a;
}

std::vector<Shape> shapes() {
  return {{},
          {1, 64, 1, 4, 64, 100, true},
          {2, 65, 2, 2, 100, 64, true},
          {2, 70, 2, 4, 48, 33, false},
          {1, 64, 2, 2, 63, 64, true},
          {4, 1, 2, 2, 47, 63, false}};
}

// Contiguous tensors have the traits that the descriptor lets one expect.
TEST(Traits, OfContiguousTensorsAreExpected) {
  for (const Rule& rule : testing::all_rules()) {
    if (rule.general_erase()) continue;
    for (const Shape& shape : shapes()) {
      Plan plan = plan_of(rule, shape);
      if (shape.K % 3 == 0) plan.state_layout = FW_STATE_K_FIRST;
      const DevicePlan device = make_device_plan(plan, 132);
      Problem x = problem_shape(plan);
      x.in = contiguous(plan, false);
      CallTraits got = call_traits(x, device);
      GradientArgs gradients;
      gradients.grads.d = contiguous(plan, true);
      gradients.d_o = x.in.v;
      add_gradients(gradients, got);
      TokenForwardArgs token;
      token.problem = x;
      token.problem.initial_state = token.final_state = contiguous_state(plan);
      add_states(token, got);
      const CallTraits expected = expected_traits(plan, device);
      EXPECT_EQ(to_string(got), to_string(expected));
      EXPECT_EQ(got, expected);
    }
  }
}

// Whatever memory tensors have: each phase has a kernel, and the scan reads what prepare leaves.
TEST(Pipeline, IsPlannedForAnyMemory) {
  Random random(48);
  std::set<ForwardScan> scans;
  std::set<PrepareKernel> prepares;
  for (const Rule& rule : testing::all_rules()) {
    if (rule.general_erase()) continue;
    for (const Shape& shape : shapes()) {
      const Plan plan = plan_of(rule, shape);
      const DevicePlan device = make_device_plan(plan, 132);
      for (int i = 0; i < 20; ++i) {
        CallTraits t = expected_traits(plan, device);
        const auto any = [&] { return random.uniform() < 0.5; };
        for (TokenTraits* all : {&t.in, &t.d}) {
          for (TensorTraits& tensor : *all) {
            if (!tensor.present || any()) continue;
            tensor.bf16 = tensor.bf16 && any();
            tensor.aligned = tensor.aligned && any();
            tensor.vec16 = tensor.bf16 && tensor.aligned && any();
            tensor.vec2 = tensor.vec16 || any();
            tensor.near = any();
          }
        }
        t.cut = any(), t.fused = any();
        const Pipeline forward = plan_forward(t, plan, device), backward = plan_backward(t, plan, device);
        EXPECT_FALSE(to_string(forward).empty());
        EXPECT_FALSE(to_string(backward).empty());
        EXPECT_EQ(to_string(forward), to_string(plan_forward(t, plan, device)));
        if (!device.chunk_form) continue;
        scans.insert(forward.scan);
        if (!device.direct) prepares.insert(forward.prepare.kernel);
        // A kernel that reads M finds it in memory, and one that makes it has no kernel in front that does.
        const bool stored = forward.makes_m || !rule.uses_precond() || *forward.begin() == StageKind::kPrecond;
        EXPECT_TRUE(stored) << to_string(t);
        EXPECT_EQ(backward.makes_m, to_string(backward).find("M made") != std::string::npos) << to_string(t);
      }
    }
  }
  // Not a test of one kernel alone.
  EXPECT_GE(scans.size(), 7u);
  EXPECT_GE(prepares.size(), 8u);
}

// The forms that a GPU runs follow from the lines of kernels.def.
TEST(Pipeline, FormsOfArchitectures) {
  EXPECT_TRUE(forms_of(Arch::kSm90).token && forms_of(Arch::kSm90).chunk);
  EXPECT_TRUE(forms_of(Arch::kSm80).token && forms_of(Arch::kSm80).chunk);
  EXPECT_FALSE(forms_of(Arch::kNone).token || forms_of(Arch::kNone).chunk);
}

// A GPU is given no kernel of a newer architecture: with K up to 128 it has chunk kernels for every rule.
TEST(Pipeline, KernelsOfArchitectures) {
  for (const Rule& rule : testing::all_rules()) {
    if (cuda_backend().lacks(rule, 2, 2) != nullptr) continue;
    Plan plan = plan_of(rule, {});
    const RewrittenCall call(plan, 132, Arch::kSm80);
    const auto& [known, device] = call.kernels().front();
    EXPECT_TRUE(can_take_chunks(plan, Arch::kSm80)) << to_string(rule);
    ASSERT_TRUE(device.chunk_form) << to_string(rule);
    const CallTraits t = expected_traits(*known, device);
    EXPECT_EQ(t.gpu, Arch::kSm80);
    const std::string forward = to_string(plan_forward(t, *known, device)),
                      backward = to_string(plan_backward(t, *known, device));
    EXPECT_NE(forward.find(uses_hi_lo(known->rule) ? " -> sm80/forward (hi_lo)" : " -> sm80/forward"),
              std::string::npos)
        << forward;
    EXPECT_NE(backward.find("sm80/reverse"), std::string::npos) << backward;
    const bool channels = known->rule.decay == Decay::kChannel;
    EXPECT_NE(backward.find(channels ? " -> sm80/gradients_channel" : " -> sm80/gradients"), std::string::npos)
        << backward;
  }
  Shape wide;
  wide.K = 160;
  const RewrittenCall two_calls(plan_of(preset("gla").rule, wide), 132, Arch::kSm80);
  ASSERT_EQ(two_calls.kernels().size(), 2U);
  for (const KernelCall& call : two_calls.kernels()) EXPECT_TRUE(call.device.chunk_form);
  Plan plan = plan_of(testing::all_rules().front(), {});
  plan.form = FW_FORM_TOKEN;
  const DevicePlan older = make_device_plan(plan, 132, Arch::kSm80);
  EXPECT_EQ(to_string(plan_forward(expected_traits(plan, older), plan, older)),
            to_string(plan_forward(expected_traits(plan, make_device_plan(plan, 132)), plan, older)));
}

TEST(Traits, SayWhatMemoryAllows) {
  alignas(16) static char memory[64];
  TokenArg a;
  EXPECT_EQ(tensor_traits(a, 64), TensorTraits{});
  a.data = memory, a.bf16 = 1, a.stride_h = 64, a.stride_t = 128, a.stride_b = 1280;
  const TensorTraits whole = tensor_traits(a, 64);
  EXPECT_TRUE(whole.present && whole.bf16 && whole.aligned && whole.vec16 && whole.vec2 && whole.near && !whole.shared);
  a.data = memory + 2;
  const TensorTraits off = tensor_traits(a, 64);
  EXPECT_FALSE(off.aligned || off.vec16 || off.vec2);
  a.data = memory, a.stride_t = 132;
  EXPECT_FALSE(tensor_traits(a, 64).vec16);
  EXPECT_TRUE(tensor_traits(a, 64).vec2);
  EXPECT_FALSE(tensor_traits(a, 63).vec2);
  a.stride_t = int64_t{1} << 31;
  EXPECT_FALSE(tensor_traits(a, 64).near);
  a.divisor = 2;
  EXPECT_TRUE(tensor_traits(a, 64).shared);
}

}  // namespace
}  // namespace fw::cuda
