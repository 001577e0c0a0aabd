// Rewrites of a call on a GPU: what kernels are given, the workspace, and the text, for every rule and kind of tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "rule/gates.h"
#include "scan/backend.h"
#include "scan/cuda/rewrites/rewrite.h"
#include "support/recurrence.h"

namespace fw::cuda {
namespace {

struct Kind {
  int64_t K = 64;
  fw_dtype type = FW_BF16;  // of the tensors of tokens
  bool logits = false, chunks = true;
};

Plan plan_of(const Rule& rule, const Kind& kind) {
  Plan plan;
  plan.rule = rule;
  plan.B = plan.N = 2, plan.T = plan.longest = 70;
  plan.H = plan.HV = 2, plan.K = kind.K, plan.V = 64;
  plan.f16_io = kind.type == FW_F16, plan.bf16_io = kind.type == FW_BF16;
  plan.bf16_operands = kind.chunks;
  plan.segment = -1;
  plan.state_layout = FW_STATE_V_FIRST;
  if (kind.logits) {
    if (rule.uses_g()) plan.gates.g = GateActivation::kSoftplus;
    if (rule.uses_beta()) plan.gates.beta = GateActivation::kSigmoid;
  }
  return plan;
}

// The names in front of the kernels.
std::string front_of(const RewrittenCall& call, bool backward) {
  std::string text;
  for (const auto& rewrite : call.rewrites()) text += rewrite->before(backward);
  return text;
}

TEST(Rewrites, GiveKernelsACallThatTheyTake) {
  std::set<std::string> fronts;
  for (const Rule& rule : testing::all_rules()) {
    if (cuda_backend().lacks(rule, 2, 2) != nullptr) continue;
    for (const int64_t K : {64, 160}) {
      for (const fw_dtype type : {FW_BF16, FW_F16, FW_F32}) {
        for (const bool logits : {false, true}) {
          for (const bool chunks : {false, true}) {
            const Kind kind{K, type, logits, chunks};
            const Plan plan = plan_of(rule, kind);
            const RewrittenCall call(plan, 132);
            const std::string text = to_text(call);
            SCOPED_TRACE(text);
            size_t forward = 0, backward = 0, behind_forward = 0, behind_backward = 0;
            for (const auto& rewrite : call.rewrites()) {
              EXPECT_EQ(rewrite->forward_bytes() % 64, 0u);
              EXPECT_EQ(rewrite->backward_bytes() % 64, 0u);
              EXPECT_GE(rewrite->backward_bytes(), 1u);
              forward += rewrite->forward_bytes(), backward += rewrite->backward_bytes();
            }
            int64_t keys = 0;
            for (const KernelCall& kernels : call.kernels()) {
              const Plan& own = *kernels.plan;
              EXPECT_TRUE(own.rule.uses_k() && !own.rule.general_erase());
              EXPECT_TRUE(!own.rule.can_divide_erase_gate() || own.rule.erase == Gate::kScalar);
              EXPECT_FALSE(takes_split_k(own));
              EXPECT_EQ(kernels.device.chunk_form, takes_chunks(plan) || takes_chunks(own));
              EXPECT_EQ(own.bf16_io, type == FW_BF16 || takes_chunks(plan));
              behind_forward = std::max(behind_forward, kernels.device.forward.bytes);
              behind_backward = std::max(behind_backward, kernels.device.backward.bytes);
              keys += own.K;
            }
            EXPECT_EQ(keys, K);
            EXPECT_EQ(call.kernels().size(), takes_split_k(plan) ? 2u : 1u);
            EXPECT_EQ(call.forward_bytes(), forward + behind_forward);
            EXPECT_EQ(call.backward_bytes(), backward + behind_backward);
            EXPECT_LE(call.forward_saving_bytes(), call.forward_bytes());
            size_t saved = 0;
            for (const KernelCall& kernels : call.kernels()) saved += kernels.device.saved.bytes;
            EXPECT_GE(call.saved_bytes(), saved);
            EXPECT_EQ(text.find("stage_rows -> ") != std::string::npos,
                      type == FW_F16 || (type == FW_F32 && takes_chunks(plan)));
            EXPECT_EQ(text.find("dplr -> ") != std::string::npos, rule.general_erase());
            EXPECT_EQ(text.find("key_from_decay -> ") != std::string::npos, !rule.uses_k());
            EXPECT_EQ(text.find("erase_over_decay -> ") != std::string::npos, rule.can_divide_erase_gate());
            fronts.insert(front_of(call, true));
          }
        }
      }
    }
  }
  // Each in front of others and alone.
  for (const char* const front :
       {"", "stage_rows -> ", "gates -> ", "stage_rows -> gates -> ", "dplr -> ", "stage_rows -> dplr -> ",
        "gates -> dplr -> ", "stage_rows -> gates -> dplr -> ", "key_from_decay -> ",
        "stage_rows -> gates -> key_from_decay -> ", "erase_over_decay -> ", "stage_rows -> erase_over_decay -> ",
        "twice: ", "stage_rows -> twice: ", "key_from_decay -> twice: ", "stage_rows -> gates -> twice: "})
    EXPECT_TRUE(fronts.contains(front)) << front;
}

// A call that needs none costs nothing: its kernels have the caller's plan.
TEST(Rewrites, AreOnlyThoseThatACallNeeds) {
  Rule rule = testing::all_rules().front();
  for (const Rule& each : testing::all_rules()) {
    if (each.is_delta() && !each.general_erase() && !each.can_divide_erase_gate() && each.uses_k()) rule = each;
  }
  const Plan plan = plan_of(rule, {});
  const RewrittenCall call(plan, 132);
  EXPECT_TRUE(call.rewrites().empty());
  EXPECT_EQ(call.kernels().front().plan.get(), &plan);
}

}  // namespace
}  // namespace fw::cuda
