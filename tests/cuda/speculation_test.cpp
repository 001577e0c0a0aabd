// Tokens that may be taken back (fw_desc.token_slots) on the device, by each of the token form's kernels: the bits of
// steps of one token.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

ProblemOptions options_of(uint64_t seed) {
  ProblemOptions options;
  options.H = 1 + static_cast<int64_t>(seed % 2);
  options.HV = 2;
  options.K = seed % 3 == 0 ? 24 : seed % 3 == 1 ? 64 : 136;
  options.V = seed % 4 == 0 ? 40 : 8;
  options.initial_state = seed % 5 != 0;
  options.seed = seed;
  return options;
}

// Equal lengths: the first call has as many tokens of every sequence, those after it are packed, for the sequences have
// gone different ways.
TEST(Speculation, WhateverIsTakenBackTheTokensThatStayAreThoseOfSteps) {
  uint64_t seed = 500;
  for (const Rule& rule : all_rules()) {
    if (lacks(rule)) continue;
    ++seed;
    if (emulated() && seed % 3 != 0) continue;
    ProblemOptions options = options_of(seed);
    if (rule.general_erase()) options.H = 2;
    options.sequences = seed % 2 == 0 ? SeqLayout::uniform(2, 7) : SeqLayout({0, 5, 5, 6, 13});
    const Problem problem = random_problem(rule, options);
    HeaderRun run = device_run(FW_FORM_TOKEN);
    run.state_layout = seed % 4 < 2 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
    const ReferenceOutputs steps = header_steps(problem, run);
    EXPECT_TRUE(close(steps, problem.forward(), kTokenBound, kTokenFloor)) << describe(problem);
    for (const int64_t drafted : {3, 6}) {
      run.device_seqlens = drafted == 6 && seed % 2 == 1 && !rule.general_erase();
      run.spare_tokens = run.device_seqlens ? 3 : 0;
      EXPECT_TRUE(close(header_speculation(problem, run, drafted), steps, 0))
          << describe(problem) << " drafted " << drafted;
    }
  }
}

// One token of many heads: whole heads through shared memory.
TEST(Speculation, OneTokenACall) {
  for (const char* name : {"kda", "gated_deltanet", "precond_gated_deltanet"}) {
    ProblemOptions options = options_of(7);
    options.sequences = SeqLayout::uniform(132, 2);
    options.H = options.HV = 2;
    options.K = 64;
    options.V = 8;
    const Problem problem = random_problem(preset(name).rule, options);
    for (const fw_state_layout layout : {FW_STATE_V_FIRST, FW_STATE_K_FIRST}) {
      if (emulated() && layout == FW_STATE_K_FIRST) continue;
      HeaderRun run = device_run(FW_FORM_TOKEN);
      run.state_layout = layout;
      const ReferenceOutputs got = header_speculation(problem, run, 1);
      EXPECT_TRUE(close(got, header_steps(problem, run), 0)) << name;
      EXPECT_TRUE(close(got, problem.forward(), kTokenBound, kTokenFloor)) << name;
    }
  }
}

}  // namespace
}  // namespace fw::testing
