// Calls whose forward is one kernel (scan/cuda/sm90/fused), against the reference. So many sequences and heads that the
// plan chooses it; the emulated device has two SMs meanwhile.
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

class FusedForward : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "Hopper alone has it";
  }
  const EmulatedSms few_{2};
};

ProblemOptions many_heads(uint64_t seed) {
  ProblemOptions options;
  std::vector<int64_t> offsets = {0, 450, 450, 455, 900};
  for (int n = 0; !emulated() && n < 60; ++n) offsets.push_back(offsets.back() + 448 + n % 3);
  options.sequences = SeqLayout(offsets);
  options.H = 1, options.HV = 2;
  options.K = options.V = 128;
  options.seed = seed;
  return options;
}
HeaderRun bf16_run(std::string& text) {
  HeaderRun run = device_run(FW_FORM_CHUNK);
  run.bf16 = HeaderRun::Bf16Tensors::kAll;
  run.plan_text = &text;
  return run;
}

TEST_F(FusedForward, EveryRuleAgreesWithTheReference) {
  uint64_t seed = 4100;
  for (const char* name : {"gated_deltanet", "deltanet", "kaczmarz", "longhorn", "nlms"}) {
    const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, many_heads(++seed)));
    std::string text;
    HeaderRun run = bf16_run(text);
    run.state_layout = seed % 2 == 0 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(is_fused(text)) << text;
  }
}

TEST_F(FusedForward, LogitsBecomeValuesInFront) {
  ProblemOptions options = many_heads(4110);
  options.gates = logits_of(preset("gated_deltanet").rule, GateActivation::kSoftplus);
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, options));
  std::string text;
  const HeaderRun run = bf16_run(text);
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(is_fused(text)) << text;
  EXPECT_NE(text.find("kernels forward: gates -> fused/forward"), std::string::npos) << text;
}

TEST_F(FusedForward, StatesComeFromAPool) {
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, many_heads(4120)));
  std::string text;
  HeaderRun run = bf16_run(text);
  run.pool = true;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(is_fused(text)) << text;
}

TEST_F(FusedForward, OffsetsMayBeOnTheDevice) {
  // The plan knows bounds alone, by which few sequences are as long as all tokens: heads have to fill the GPU.
  ProblemOptions options = many_heads(4130);
  options.sequences = SeqLayout({0, 450, 450, 455, 900});
  options.H = emulated() ? 1 : 26, options.HV = 4 * options.H;
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, options));
  std::string text;
  HeaderRun run = bf16_run(text);
  run.device_seqlens = true;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(is_fused(text)) << text;
}

// What forward saves for backward is of the kernels that backward follows.
TEST_F(FusedForward, ForwardThatSavesRunsApart) {
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, many_heads(4140)));
  std::string text;
  HeaderRun run = bf16_run(text);
  run.forward_saves = true;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
}

// segment -1 fixes the bits, whatever the shape of the call is.
TEST_F(FusedForward, SegmentMinusOneTurnsItOff) {
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, many_heads(4150)));
  std::string text;
  HeaderRun run = bf16_run(text);
  run.segment = -1;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_FALSE(is_fused(text)) << text;
}

}  // namespace
}  // namespace fw::testing
