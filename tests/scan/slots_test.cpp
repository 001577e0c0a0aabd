// States at slots of a pool and states of bf16 in fw_forward on the CPU: the bits of states handed over one by one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/recurrence.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

Problem problem_of(const Rule& rule, uint64_t seed) {
  ProblemOptions options;
  options.sequences = seed % 2 == 0 ? SeqLayout::uniform(4, 21) : SeqLayout({0, 40, 40, 41, 60});
  options.H = 1;
  options.HV = 2;
  options.K = 12;
  options.V = seed % 3 == 0 ? 144 : 10;
  options.seed = seed;
  return with_states_of_some(random_problem(rule, options));
}

TEST(Slots, ForwardFromAPoolGivesTheBitsOfStatesOneByOne) {
  uint64_t seed = 700;
  for (const Rule& rule : all_rules()) {
    const Problem problem = problem_of(rule, ++seed);
    for (const fw_form form : {FW_FORM_AUTO, FW_FORM_TOKEN}) {
      HeaderRun run;
      run.form = form;
      run.state_layout = seed % 4 < 2 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
      const ReferenceOutputs expected = header_forward(problem, run);
      run.pool = true;
      for (const bool in_place : {false, true}) {
        run.state_in_place = in_place;
        EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << describe(problem);
      }
    }
  }
}

// o is what float32 states of the same numbers give, and the final state that rounded once.
TEST(Slots, StatesOfBf16) {
  for (const char* name : {"gated_deltanet", "kda", "precond_gated_deltanet", "linear_attention"}) {
    Problem problem = problem_of(preset(name).rule, 4);
    round_states(problem);
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      for (const fw_state_layout layout : {FW_STATE_K_FIRST, FW_STATE_V_FIRST}) {
        HeaderRun run;
        run.dtype = FW_F32;
        run.form = form;
        run.state_layout = layout;
        ReferenceOutputs expected = header_forward(problem, run);
        const ReferenceInputs grads = header_backward(problem, run);
        round_values(expected.final_state);
        run.bf16_states = true;
        EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << name;
        EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
        run.saved = false;
        EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
        run.pool = true;
        EXPECT_TRUE(close(header_forward(problem, run), expected, 0)) << name;
        if (form == FW_FORM_CHUNK) continue;
        run.pool = false;
        const ReferenceOutputs steps = header_steps(problem, run, 1000);
        EXPECT_TRUE(close(steps, expected, 0)) << name;
      }
    }
  }
}

TEST(Slots, WhatTheyCannotBeIsRefused) {
  static const int32_t slots[2] = {0, 1}, far[2] = {0, 3};
  const auto message = [](auto&& change) {
    fw_desc desc;
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
    desc.B = 2, desc.T = 1, desc.H = desc.HV = desc.K = desc.V = 1;
    desc.state_pool.slots = slots;
    desc.state_pool.num_slots = 3;
    float numbers[3] = {1, 1, 1}, states[3] = {};
    const int64_t rows[4] = {2, 1, 1, 1}, pool[4] = {3, 1, 1, 1};
    fw_inputs in;
    fw_outputs out;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    in.q = in.k = in.v = out.o = fw_tensor_of(numbers, FW_F32, 4, rows);
    in.initial_state = out.final_state = fw_tensor_of(states, FW_F32, 4, pool);
    void* saved = nullptr;
    change(desc, in, saved);
    alignas(64) static char space[1 << 16];
    return fw_forward(&desc, &in, &out, saved, sizeof(space), space, sizeof(space)) == FW_OK
               ? std::string()
               : std::string(fw_last_error());
  };
  EXPECT_EQ(message([](fw_desc&, fw_inputs&, void*&) {}), "");
  EXPECT_THAT(message([](fw_desc&, fw_inputs&, void*& saved) { saved = &saved; }),
              HasSubstr("saved: expected NULL with slots"));
  EXPECT_THAT(message([](fw_desc& d, fw_inputs&, void*&) { d.state_pool.slots = far; }),
              HasSubstr("slots of sequence 1: expected a slot below 3, got 3"));
  EXPECT_THAT(message([](fw_desc& d, fw_inputs&, void*&) { d.state_pool.final_slots = far; }),
              HasSubstr("final_slots of sequence 1: expected a slot below 3, got 3"));
  EXPECT_THAT(
      message([](fw_desc& d, fw_inputs&, void*&) { d.state_pool.slots = nullptr, d.state_pool.final_slots = far; }),
      HasSubstr("final_slots: expected NULL without slots"));
  EXPECT_THAT(message([](fw_desc&, fw_inputs& in, void*&) { in.initial_state.dtype = FW_F64; }),
              HasSubstr("initial_state: dtype: expected FW_F32 or FW_BF16 as the descriptor says, got FW_F64"));
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
  desc.B = desc.T = desc.H = desc.HV = desc.K = desc.V = 1;
  desc.state_pool.slots = desc.state_pool.final_slots = slots;
  desc.state_pool.num_slots = 1;
  fw_plan* plan = nullptr;
  EXPECT_EQ(fw_plan_create(&desc, 1, &plan), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("final_slots: expected NULL in fw_step"));
}

}  // namespace
}  // namespace fw::testing
