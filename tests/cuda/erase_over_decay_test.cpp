// Rules that erase before a decay of one number on the device, whose kernels erase after it with a gate over the decay
// (scan/cuda/rewrites/erase_over_decay.h), against the reference in double. What holds for every rule is looked at with
// comba in the other tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

// Erase gates of their own and erases tied to a gain or to 1; gains that the write takes too or not.
constexpr const char* kRules[] = {
    "comba",
    "gated_deltanet erase_state=previous",
    "decay=scalar erase_state=previous gain=gate write=channel q_norm=l2 k_norm=l2",
    "decay=scalar erase_state=previous k_norm=l2",
    "decay=scalar erase_state=previous gain=gate erase_key=own feedback=learned q_norm=l2 k_norm=l2",
    "kaczmarz erase=scalar erase_state=previous",
    "precond_gated_deltanet erase=scalar erase_state=previous",
};

ProblemOptions options_of(const Rule& rule, uint64_t seed) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 19, 19, 83, 160});
  options.H = 1;
  options.HV = seed % 2 == 0 ? 2 : 1;
  options.K = seed % 2 == 0 ? 64 : 24;
  options.V = seed % 3 == 0 ? 40 : 64;
  options.initial_state = true;
  options.seed = rule_seed(rule, seed);
  return options;
}

// Decays of 0 and -inf too, whose erase still finds the state before them.
TEST(EraseOverDecay, ForwardAndGradientsMatchTheReference) {
  uint64_t seed = 0;
  for (const char* text : kRules) {
    const Rule rule = parse_rule(text);
    ASSERT_TRUE(rule.can_divide_erase_gate()) << text;
    for (const bool edges : {false, true}) {
      for (const fw_form form : {FW_FORM_TOKEN, FW_FORM_CHUNK}) {
        ProblemOptions options = options_of(rule, ++seed);
        options.edge_decays = edges;
        const Problem problem = of_bf16_numbers(random_problem(rule, options));
        SCOPED_TRACE(describe(problem));
        HeaderRun run = device_run(form);
        if (form == FW_FORM_CHUNK && seed % 4 != 0) run.bf16 = HeaderRun::Bf16Tensors::kAll;
        run.saved = seed % 3 != 0;
        run.row_padding = seed % 2 == 0 ? 5 : 0;
        const bool token = form == FW_FORM_TOKEN;
        const ReferenceInputs got = header_backward(problem, run), expected = problem.backward();
        EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), token ? kTokenBound : ChunkBounds{}.output,
                          token ? kTokenFloor : kChunkFloor));
        EXPECT_TRUE(token ? close(got, expected, kTokenBound, kTokenFloor)
                          : close_gradients(got, expected, rule, edges, {}));
      }
    }
  }
}

// No cutoff: where a decay is 0 the erase still sees what was before it. -30 a token is beyond the least log-decay of
// chunks, of which exp(-9) remains.
TEST(EraseOverDecay, DecaysOfAnyStrength) {
  const Rule rule = preset("comba").rule;
  for (const double g : {-0.001, -1.0, -8.5, -9.5, -30.0, -1e4}) {
    ProblemOptions options = options_of(rule, 40);
    Problem problem = random_problem(rule, options);
    for (double& x : problem.in.g) x = g;
    problem = of_bf16_numbers(std::move(problem));
    for (const fw_form form : {FW_FORM_TOKEN, FW_FORM_CHUNK}) {
      HeaderRun run = device_run(form);
      if (form == FW_FORM_CHUNK) run.segment = 64;
      SCOPED_TRACE(fmt::format("g {}: {}", g, describe(problem)));
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(),
                        form == FW_FORM_TOKEN ? kTokenBound : ChunkBounds{}.output, kChunkFloor));
    }
  }
}

TEST(EraseOverDecay, StepsAndPoolsEqualTheWholeSequence) {
  for (const char* text : kRules) {
    const Rule rule = parse_rule(text);
    ProblemOptions options = options_of(rule, 8);
    options.sequences = SeqLayout::uniform(3, 9);
    const Problem problem = with_states_of_some(random_problem(rule, options));
    SCOPED_TRACE(describe(problem));
    HeaderRun run = device_run(FW_FORM_TOKEN);
    EXPECT_TRUE(close(header_steps(problem, run, 4), problem.forward(), kTokenBound, kTokenFloor));
    const ReferenceOutputs expected = header_forward(problem, run);
    run.pool = true;
    EXPECT_TRUE(close(header_forward(problem, run), expected, 0));
  }
}

TEST(EraseOverDecay, SaysItsKernels) {
  ProblemOptions options;
  options.H = options.HV = 2, options.K = options.V = 64;
  const std::string text = text_of_call(random_problem(preset("comba").rule, options), 2, 70);
  EXPECT_THAT(text, ::testing::HasSubstr("kernels forward: erase_over_decay -> prepare"));
  EXPECT_THAT(text, ::testing::HasSubstr(" -> erase_over_decay\n"));
}

}  // namespace
}  // namespace fw::testing
