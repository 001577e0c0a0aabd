// States at slots of a pool and states of bf16 in fw_forward on the device: the bits of states handed over one by one.
// By the token form, the chunk form of all kinds of scans, and cut into segments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

TEST(Slots, ForwardFromAPoolGivesTheBitsOfStatesOneByOne) {
  uint64_t seed = 800;
  for (const Preset& named : presets()) {
    ++seed;
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = form == FW_FORM_CHUNK ? SeqLayout({0, 65, 65, 130})
                          : seed % 2 == 0       ? SeqLayout::uniform(3, 1)
                                                : SeqLayout({0, 5, 5, 12});
      options.H = named.rule.general_erase() ? 2 : 1;
      options.HV = 2;
      options.K = seed % 3 == 0 ? 40 : 64;
      options.V = seed % 3 == 1 ? 24 : 64;
      options.seed = seed;
      Problem problem = with_states_of_some(of_bf16_numbers(random_problem(named.rule, options)));
      HeaderRun run = device_run(form);
      run.state_layout = seed % 4 < 2 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
      run.bf16_states = seed % 2 == 0;
      run.device_seqlens = seed % 5 == 0 && !named.rule.general_erase();
      if (run.bf16_states) round_states(problem);
      const ReferenceOutputs expected = header_forward(problem, run);
      EXPECT_TRUE(close(expected, problem.forward(), ChunkBounds{}.output, kChunkFloor)) << named.name;
      run.pool = true;
      for (const bool in_place : {false, true}) {
        run.state_in_place = in_place;
        EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << named.name << " " << describe(problem);
      }
    }
  }
}

TEST(Slots, OfSequencesThatAreCut) {
  for (const char* name : {"gated_deltanet", "kda", "mamba2"}) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, 200, 200, 330});
    options.K = options.V = 64;
    options.seed = 9;
    const Problem problem = with_states_of_some(of_bf16_numbers(random_problem(preset(name).rule, options)));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.segment = 64;
    const ReferenceOutputs expected = header_forward(problem, run);
    run.pool = true;
    EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << name;
  }
}

// The final state is rounded once; o and gradients are what float32 states of the same numbers give.
TEST(Slots, StatesOfBf16) {
  for (const char* name : {"gated_deltanet", "kda", "linear_attention"}) {
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = SeqLayout::uniform(2, form == FW_FORM_CHUNK ? 70 : 6);
      options.K = options.V = 64;
      options.seed = 10;
      Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      round_states(problem);
      HeaderRun run = device_run(form);
      ReferenceOutputs expected = header_forward(problem, run);
      const ReferenceInputs grads = header_backward(problem, run);
      round_values(expected.final_state);
      run.bf16_states = true;
      EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << name;
      EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
    }
  }
}

}  // namespace
}  // namespace fw::testing
