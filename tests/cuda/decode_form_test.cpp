// FW_FORM_DECODE on the device: outputs and states have the bits of single steps, gradients those of the chunk form.
#include <gtest/gtest.h>

#include "cuda/device_runs.h"
#ifdef FW_CUDA_EMULATION
#include "emulation/gpu.h"
#endif

namespace fw::testing {
namespace {

HeaderRun decode_form_run() {
  HeaderRun run = device_run(FW_FORM_DECODE);
  run.bf16_operands = true;
  run.bf16 = HeaderRun::Bf16Tensors::kAll;
  return run;
}

TEST(DecodeForm, HasTheBitsOfStepsAndTheGradientsOfChunks) {
  for (const Rule& rule : all_rules()) {
    const uint64_t seed = rule_seed(rule, 800);
    if (lacks(rule) || (emulated() && seed % (rule.uses_precond() ? 13 : 7) != 0)) continue;
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(2, 66);
    options.H = 1;
    options.HV = 2;
    options.K = 64;
    options.V = 32;
    options.seed = seed;
    if (rule.general_erase()) options.H = 2;
    if (seed % 2 == 0) options.gates = logits_of(rule, kDecayActivations[seed % 3]);
    const Problem problem = of_bf16_numbers(random_problem(rule, options));
    HeaderRun run = decode_form_run();
    SCOPED_TRACE(describe(problem));
    const ReferenceOutputs steps = header_steps(problem, run, 1);
    for (const bool saves : {false, true}) {
      run.forward_saves = saves;
      EXPECT_TRUE(close(header_forward(problem, run), steps, 0));
    }
    HeaderRun chunks = run;
    chunks.form = FW_FORM_CHUNK;
    const ReferenceInputs expected = header_backward(problem, chunks);
    for (const bool saved : {false, true}) {
      run.saved = saved;
      EXPECT_TRUE(close(header_backward(problem, run), expected, 0));
    }
  }
}

TEST(DecodeForm, IsInThePlan) {
  ProblemOptions options;
  options.K = options.V = 64;
  std::string text;
  HeaderRun run = decode_form_run();
  run.plan_text = &text;
  header_forward(random_problem(preset("kda").rule, options), run);
  EXPECT_NE(text.find("form: decode: forward by the token form, backward in chunks"), std::string::npos) << text;
  EXPECT_NE(text.find("kernels forward: token/"), std::string::npos) << text;
}

#ifdef FW_CUDA_EMULATION
// A GPU other than Hopper has no chunk kernels for an erase and K above 128. float32 tensors are what rewrites of the
// chunk form would stage.
TEST(DecodeForm, OnAnOlderGpu) {
  const cuda::emulation::Gpu before = cuda::emulation::gpu;
  cuda::emulation::gpu.major = 8;
  const struct {
    const char *rule, *backward;
    int64_t K;
  } calls[] = {
      {"kda", "backward too", 130}, {"kda", "backward in chunks", 64}, {"gated_deltanet", "backward in chunks", 64}};
  for (const auto& call : calls) {
    for (const bool bf16 : {true, false}) {
      ProblemOptions options;
      options.sequences = SeqLayout::uniform(1, 66);
      options.K = call.K, options.V = 64;
      const Problem problem = of_bf16_numbers(random_problem(preset(call.rule).rule, options));
      HeaderRun run = decode_form_run();
      if (!bf16) run.bf16 = HeaderRun::Bf16Tensors::kNone;
      SCOPED_TRACE(describe(problem));
      std::string text;
      const ReferenceOutputs steps = header_steps(problem, run, 1);
      run.plan_text = &text;
      run.forward_saves = true;
      EXPECT_TRUE(close(header_forward(problem, run), steps, 0));
      EXPECT_NE(text.find(call.backward), std::string::npos) << text;
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
    }
  }
  cuda::emulation::gpu = before;
}
#endif

}  // namespace
}  // namespace fw::testing
