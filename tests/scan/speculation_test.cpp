// Tokens that may be taken back (fw_desc.token_slots) on the CPU: whatever was drafted and how much of it was accepted,
// the bits of steps of one token; slots, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/left_out.h"
#include "support/recurrence.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

TEST(Speculation, WhateverIsTakenBackTheTokensThatStayAreThoseOfSteps) {
  uint64_t seed = 300;
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    ++seed;
    ProblemOptions options;
    options.sequences = seed % 2 == 0 ? SeqLayout::uniform(3, 11) : SeqLayout({0, 9, 9, 10, 22});
    options.H = 2;
    options.HV = 4;
    options.K = 12;
    options.V = seed % 3 == 0 ? 144 : 10;  // more than one task of columns
    options.initial_state = seed % 4 != 0;
    options.seed = seed;
    const Problem problem = random_problem(rule, options);
    for (const int64_t drafted : {1, 2, 5, 8}) {
      if (left_out(++turn, 5)) continue;
      HeaderRun run;
      run.state_layout = drafted % 2 == 0 ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
      run.dtype = drafted == 5 ? FW_F32 : FW_F64;
      const ReferenceOutputs got = header_speculation(problem, run, drafted);
      EXPECT_TRUE(close(got, header_steps(problem, run), 0)) << describe(problem) << " drafted " << drafted;
      EXPECT_TRUE(close(got, problem.forward(), run.dtype == FW_F64 ? 1e-10 : 1e-4, 1e-3))
          << describe(problem) << " drafted " << drafted;
    }
  }
}

TEST(Speculation, TensorsOfBf16) {
  for (const char* name : {"kda", "precond_gated_deltanet"}) {
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(2, 7);
    options.K = options.V = 16;
    const Problem problem = random_problem(preset(name).rule, options);
    HeaderRun run;
    run.dtype = FW_F32;
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    EXPECT_TRUE(close(header_speculation(problem, run, 3), header_steps(problem, run), 0)) << name;
  }
}

// linear_attention of one head of one channel and one value: S += k v.
struct Pool {
  Pool() {
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
    desc.B = 3, desc.T = 2, desc.H = desc.HV = desc.K = desc.V = 1;
    desc.scale = 1;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    const int64_t rows[4] = {3, 2, 1, 1};
    in.q = fw_tensor_of(ones.data(), FW_F32, 4, rows);
    in.k = fw_tensor_of(ones.data(), FW_F32, 4, rows);
    in.v = fw_tensor_of(v.data(), FW_F32, 4, rows);
    out.o = fw_tensor_of(o.data(), FW_F32, 4, rows);
    bind(states, in.initial_state);
    out.final_state = in.initial_state;
  }
  static void bind(std::vector<float>& pool, fw_tensor& tensor) {
    const int64_t shape[4] = {static_cast<int64_t>(pool.size()), 1, 1, 1};
    tensor = fw_tensor_of(pool.data(), FW_F32, 4, shape);
  }
  std::string step() {
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    if (fw_workspace_query(&desc, &sizes) != FW_OK) return fw_last_error();
    std::vector<char> space(sizes.forward + 64);
    void* const aligned = space.data() + (64 - reinterpret_cast<uintptr_t>(space.data()) % 64) % 64;
    return fw_step(&desc, &in, &out, aligned, sizes.forward) == FW_OK ? std::string() : std::string(fw_last_error());
  }
  std::vector<float> ones = std::vector<float>(6, 1), v = {1, 2, 3, 4, 5, 6}, o = std::vector<float>(6, 9),
                     states = {100, 200, 300, 400, 500};
  fw_desc desc;
  fw_inputs in;
  fw_outputs out;
};

TEST(Speculation, SlotsOfTheCpuAreThoseOfAPool) {
  for (const bool clears : {false, true}) {
    Pool p;
    const int32_t slots[3] = {4, 0, 1};
    p.desc.state_pool.slots = slots;
    p.desc.state_pool.num_slots = 5;
    p.desc.state_pool.first_slot = 1;
    p.desc.state_pool.skipped = clears ? FW_SKIPPED_ZERO : FW_SKIPPED_KEPT;
    ASSERT_EQ(p.step(), "");
    const float kept = clears ? 0 : 9;
    EXPECT_EQ(p.o, (std::vector<float>{501, 503, kept, kept, 205, 211}));
    EXPECT_EQ(p.states, (std::vector<float>{100, 211, 300, 400, 503}));
  }
}

// From a pool that stays into one of the tokens, as a server with a buffer for drafts has it; and a slot that is none.
TEST(Speculation, StatesOfTokensMayLieInAnotherPool) {
  Pool p;
  std::vector<float> drafts(7, -1);
  const int32_t slots[3] = {2, -1, 0}, token_slots[6] = {6, 5, 4, 3, -1, 1};
  p.desc.state_pool.slots = slots;
  p.desc.state_pool.num_slots = 5;
  p.desc.speculation.token_slots = token_slots;
  p.desc.speculation.columns = 2;
  p.desc.speculation.num_slots = 7;
  Pool::bind(drafts, p.out.final_state);
  ASSERT_EQ(p.step(), "");
  EXPECT_EQ(p.o, (std::vector<float>{301, 303, 9, 9, 105, 111}));
  EXPECT_EQ(p.states, (std::vector<float>{100, 200, 300, 400, 500}));
  EXPECT_EQ(drafts, (std::vector<float>{-1, 111, -1, -1, -1, 303, 301}));
  p.out.final_state = {};  // nothing is kept
  ASSERT_EQ(p.step(), "");
}

TEST(Speculation, WhatItCannotBeIsRefused) {
  static const int32_t slots[6] = {0, 0, 1, 1, 2, 2}, accepted[3] = {1, 1, 1};
  const auto message = [](auto&& change) {
    Pool p;
    p.desc.speculation.token_slots = slots;
    p.desc.speculation.columns = 2;
    p.desc.speculation.num_slots = 5;
    p.desc.speculation.accepted = accepted;
    change(p);
    return p.step();
  };
  EXPECT_EQ(message([](Pool&) {}), "");
  EXPECT_THAT(message([](Pool& p) { p.desc.speculation.columns = 1; }),
              HasSubstr("speculation.columns: expected at least 2, the tokens of the longest sequence, got 1"));
  EXPECT_THAT(message([](Pool& p) { p.desc.speculation.num_slots = 0; }),
              HasSubstr("speculation.num_slots: expected 1 to"));
  EXPECT_THAT(message([](Pool& p) { p.desc.state_pool.slots = slots, p.desc.state_pool.num_slots = 5; }),
              HasSubstr("slots: expected NULL with accepted"));
  EXPECT_THAT(message([](Pool& p) { p.desc.speculation.token_slots = nullptr; }),
              HasSubstr("accepted: expected NULL without token_slots"));
  EXPECT_THAT(message([](Pool& p) { p.desc.state_pool.first_slot = -1; }),
              HasSubstr("first_slot: expected 0 or more, got -1"));
  EXPECT_THAT(message([](Pool& p) { p.desc.state_pool.skipped = 2; }),
              HasSubstr("skipped: expected FW_SKIPPED_KEPT or FW_SKIPPED_ZERO, got 2"));
  EXPECT_THAT(message([](Pool& p) { p.desc.speculation.num_slots = 4; }),
              HasSubstr("initial_state: shape: expected [4, 1, 1, 1], got [5, 1, 1, 1]"));
  static const int32_t far[6] = {0, 0, 1, 5, 2, 2};
  EXPECT_THAT(message([](Pool& p) { p.desc.speculation.token_slots = far; }),
              HasSubstr("token_slots of sequence 1: expected a slot below 5, got 5"));
  Pool p;
  p.desc.speculation.token_slots = slots;
  p.desc.speculation.columns = 2;
  p.desc.speculation.num_slots = 5;
  EXPECT_EQ(fw_forward(&p.desc, &p.in, &p.out, nullptr, 0, nullptr, 0), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("token_slots: expected NULL in a call other than fw_step"));
}

}  // namespace
}  // namespace fw::testing
