// Rules with Rule::general_erase() on the device, two rows a token (scan/cuda/rewrites/dplr_as_two_tokens.h), against
// the reference in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

std::vector<Rule> general_rules() {
  std::vector<Rule> rules;
  for (const Rule& rule : all_rules()) {
    if (rule.general_erase() && !lacks(rule)) rules.push_back(rule);
  }
  for (const char* text :
       {"decay=channel erase_state=previous", "decay=channel erase_write=own gain=gate",
        "decay=scalar erase_state=previous gain=gate",
        "decay=scalar erase_key=own erase_state=previous erase_write=own erase=channel write=channel q_norm=l2",
        "erase_write=own erase_key=own gain=gate",
        "decay=channel erase_state=previous erase=scalar write=scalar read=corrected"}) {
    rules.push_back(parse_rule(text));
  }
  return rules;
}

ProblemOptions small(uint64_t seed) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 19, 19, 20, 37});
  options.H = options.HV = 2;
  options.K = seed % 2 == 0 ? 24 : 33;
  options.V = seed % 3 == 0 ? 20 : 9;
  options.initial_state = seed % 3 != 1;
  options.seed = seed;
  return options;
}

TEST(DplrAsTwoTokens, ForwardAndGradientsMatchTheReference) {
  ASSERT_GE(general_rules().size(), 7u);
  for (const Rule& rule : general_rules()) {
    for (const bool edges : {false, true}) {
      const uint64_t seed = rule_seed(rule, 7);
      ProblemOptions options = small(seed);
      options.edge_decays = edges;
      const Problem problem = random_problem(rule, options);
      SCOPED_TRACE(describe(problem));
      HeaderRun run = device_run(edges ? FW_FORM_TOKEN : FW_FORM_AUTO);
      run.state_layout = seed % 2 == 0 ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
      run.row_padding = edges ? 5 : 0;
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), kTokenBound, kTokenFloor));
      EXPECT_TRUE(close(header_backward(problem, run), problem.backward(), kTokenBound, kTokenFloor));
    }
  }
}

// All tensors of bf16 values: streams are made in float32 of what bf16 keeps, so outputs are as near as outputs of that
// type can be.
TEST(DplrAsTwoTokens, TensorsOfBf16) {
  const Rule rule = preset("dplr").rule;
  for (const int64_t length : {1, 2, 33}) {
    ProblemOptions options = small(40 + static_cast<uint64_t>(length));
    options.sequences = SeqLayout::uniform(2, length);
    options.K = options.V = 64;
    const Problem problem = of_bf16_numbers(random_problem(rule, options));
    SCOPED_TRACE(describe(problem));
    HeaderRun run = device_run(FW_FORM_AUTO);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), rule, false, {}));
  }
}

// Chunks of 32 tokens: lengths around them, and decays of 0 and -inf, of which the chunk form leaves exp(-9) of a
// state.
TEST(DplrAsTwoTokens, ChunkFormMatchesTheReference) {
  for (const Rule& rule : general_rules()) {
    for (const bool edges : {false, true}) {
      const uint64_t seed = rule_seed(rule, 9);
      ProblemOptions options = small(seed);
      options.sequences =
          edges ? SeqLayout({0, 31, 31, 63, 96, 161}) : SeqLayout::uniform(1, 33 + static_cast<int64_t>(seed % 64));
      options.edge_decays = edges;
      options.K = seed % 2 == 0 ? 64 : 24;
      const Problem problem = of_bf16_numbers(random_problem(rule, options));
      SCOPED_TRACE(describe(problem));
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = seed % 3 == 0 ? HeaderRun::Bf16Tensors::kNone : HeaderRun::Bf16Tensors::kAll;
      run.saved = seed % 4 != 0;
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), rule, edges, {}));
    }
  }
}

// What the bits of a call do not depend on: bits_test.cpp. Segments are exact.
TEST(DplrAsTwoTokens, ChunkFormInSegments) {
  const Rule rule = preset("dplr").rule;
  ProblemOptions options = small(61);
  options.sequences = SeqLayout({0, 150, 281});
  options.K = options.V = 64;
  const Problem problem = with_states_of_some(of_bf16_numbers(random_problem(rule, options)));
  HeaderRun run = device_run(FW_FORM_CHUNK);
  run.segment = 64;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), rule, false, {}));
}

TEST(DplrAsTwoTokens, StepsAndPoolsEqualTheWholeSequence) {
  for (const Rule& rule : general_rules()) {
    ProblemOptions options = small(rule_seed(rule, 8));
    options.sequences = SeqLayout::uniform(3, 9);
    const Problem problem = with_states_of_some(random_problem(rule, options));
    SCOPED_TRACE(describe(problem));
    HeaderRun run = device_run(FW_FORM_TOKEN);
    EXPECT_TRUE(
        close(header_steps(problem, run, options.seed % 2 == 0 ? 1 : 4), problem.forward(), kTokenBound, kTokenFloor));
    const ReferenceOutputs expected = header_forward(problem, run);
    run.pool = true;
    EXPECT_TRUE(close(header_forward(problem, run), expected, 0));
  }
}

TEST(DplrAsTwoTokens, SaysWhatItCannotTake) {
  const auto message = [](const char* rule, int64_t HV, fw_form form) {
    ProblemOptions options = small(2);
    options.HV = HV;
    try {
      header_forward(random_problem(parse_rule(rule), options), device_run(form));
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(message("decay=channel erase_state=previous k_norm=l2", 2, FW_FORM_AUTO),
              HasSubstr("rule: expected k_norm=raw with erase_state=previous or erase_write=own on CUDA"));
  EXPECT_THAT(message("erase_write=own gain=kaczmarz", 2, FW_FORM_AUTO),
              HasSubstr("rule: expected gain=one or gate with"));
  EXPECT_THAT(message("dplr", 4, FW_FORM_AUTO), HasSubstr("rule: expected as many key heads as value heads with"));
  EXPECT_THAT(message("decay=constant erase_state=previous", 2, FW_FORM_AUTO),
              HasSubstr("rule: expected a decay that is a tensor, or none with"));
}

}  // namespace
}  // namespace fw::testing
