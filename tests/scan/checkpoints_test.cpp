// States on the way of fw_forward (fw_desc.checkpoint_interval) on the CPU.
#include "support/checkpoints.h"

#include <gmock/gmock.h>

#include <string>

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

TEST(Checkpoints, AreWhereAForwardGoesOnWithTheSameBits) {
  uint64_t seed = 2600;
  for (const Rule& rule : all_rules()) {
    ++seed;
    ProblemOptions options;
    options.sequences = seed % 2 == 0 ? SeqLayout::uniform(2, 130) : SeqLayout({0, 63, 63, 127, 322, 386});
    options.H = 1;
    options.HV = 1 + static_cast<int64_t>(seed % 3 == 0);
    options.K = 12;
    options.V = seed % 5 == 0 ? 144 : 10;
    options.initial_state = seed % 2 == 0;
    options.seed = seed;
    const Problem problem = random_problem(rule, options);
    HeaderRun run;
    run.form = seed % 4 == 0 ? FW_FORM_TOKEN : FW_FORM_CHUNK;
    run.state_layout = seed % 4 < 2 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
    run.pool = seed % 3 == 1;
    run.forward_saves = seed % 7 == 0;
    expect_checkpoints(problem, run, seed % 5 < 3 ? 64 : 128);
  }
}

// Of every length, and of sequences without tokens: no checkpoint is where none belongs.
TEST(Checkpoints, OfEveryLength) {
  for (int64_t length = 0; length <= 130; ++length) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, length, length, length + 64});
    options.K = options.V = 4;
    options.seed = static_cast<uint64_t>(length) + 1;
    const Problem problem = random_problem(preset("precond_gated_deltanet").rule, options);
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      HeaderRun run;
      run.form = form;
      run.pool = length % 2 == 1;
      expect_checkpoints(problem, run, 64);
    }
  }
}

TEST(Checkpoints, OfBf16AreRoundedOnce) {
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(2, 130);
  options.K = options.V = 16;
  options.seed = 3;
  Problem problem = random_problem(preset("precond_kda").rule, options);
  round_states(problem);
  HeaderRun run;
  run.dtype = FW_F32;
  run.form = FW_FORM_CHUNK;
  run.bf16_states = true;
  expect_checkpoints(problem, run, 64);
}

TEST(Checkpoints, WhatTheyCannotBeIsRefused) {
  static const int32_t slots[2] = {0, 2};
  const auto message = [](auto&& change) {
    fw_desc desc;
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
    desc.B = desc.H = desc.HV = desc.K = desc.V = 1;
    desc.T = 128;
    desc.checkpoints.interval = 64;
    float numbers[128] = {}, states[3] = {};
    const int64_t rows[4] = {1, 128, 1, 1}, pool[4] = {2, 1, 1, 1};
    fw_inputs in;
    fw_outputs out;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    in.q = in.k = in.v = out.o = fw_tensor_of(numbers, FW_F32, 4, rows);
    out.checkpoints = fw_tensor_of(states, FW_F32, 4, pool);
    change(desc, out);
    alignas(64) static char space[1 << 20];
    return fw_forward(&desc, &in, &out, nullptr, 0, space, sizeof(space)) == FW_OK ? std::string()
                                                                                   : std::string(fw_last_error());
  };
  EXPECT_EQ(message([](fw_desc&, fw_outputs&) {}), "");
  EXPECT_THAT(message([](fw_desc& d, fw_outputs&) { d.checkpoints.interval = 96; }),
              HasSubstr("checkpoints.interval: expected 0 or a multiple of 64 tokens, got 96"));
  EXPECT_THAT(message([](fw_desc& d, fw_outputs&) { d.chunk = 48; }),
              HasSubstr("checkpoints.interval: expected 0 or a multiple of 64 tokens and of the chunk 48"));
  EXPECT_THAT(message([](fw_desc& d, fw_outputs&) { d.checkpoints.interval = 0; }),
              HasSubstr("checkpoints: expected none without checkpoints.interval"));
  EXPECT_THAT(message([](fw_desc& d, fw_outputs&) { d.checkpoints.interval = 128; }),
              HasSubstr("checkpoints: shape: expected [1, 1, 1, 1]"));
  const auto with_slots = [](int64_t columns, int64_t count) {
    return [=](fw_desc& d, fw_outputs& out) {
      d.checkpoints.slots = slots, d.checkpoints.columns = columns, d.checkpoints.num_slots = count;
      out.checkpoints.shape[0] = count;
    };
  };
  EXPECT_EQ(message(with_slots(2, 3)), "");
  EXPECT_THAT(message(with_slots(1, 3)),
              HasSubstr("checkpoints.columns: expected at least 2, the checkpoints of the longest sequence, got 1"));
  EXPECT_THAT(message(with_slots(2, 2)), HasSubstr("checkpoints.slots of sequence 0: expected a slot below 2, got 2"));
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
  desc.B = desc.T = desc.H = desc.HV = desc.K = desc.V = 1;
  desc.checkpoints.interval = 64;
  fw_plan* plan = nullptr;
  EXPECT_EQ(fw_plan_create(&desc, 1, &plan), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("checkpoints.interval: expected 0 in fw_step"));
}

}  // namespace
}  // namespace fw::testing
