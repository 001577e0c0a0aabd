// Decode that does not write the states (fw_desc.ring) on the CPU. Where every token is folded it has the bits of
// steps, else values of the reference. The cut into calls, tokens that are taken back and other sequences change none.
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

constexpr double kBound = 1e-10, kRingBound = 1e-4, kFloor = 1e-3;

ProblemOptions options_of(uint64_t seed) {
  ProblemOptions options;
  options.sequences = seed % 2 == 0 ? SeqLayout::uniform(3, 19) : SeqLayout({0, 17, 17, 18, 41});
  options.H = 1 + static_cast<int64_t>(seed % 2);
  options.HV = 2;
  options.K = seed % 3 == 0 ? 16 : 7;
  options.V = seed % 5 == 0 ? 144 : seed % 5 == 1 ? 16 : 5;  // more than one task of columns, whole rows, odd ones
  options.initial_state = seed % 4 != 0;
  options.seed = seed;
  return options;
}
Problem problem_of(const Rule& rule, uint64_t seed) { return random_problem(rule, options_of(seed)); }
HeaderRun run_of(uint64_t seed) {
  HeaderRun run;
  run.dtype = seed % 3 == 1 ? FW_F32 : FW_F64;
  run.state_layout = seed % 7 < 4 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
  return run;
}
bool has_ring(const Rule& rule) { return !rule.uses_erase_write(); }

::testing::AssertionResult near_reference(const ReferenceOutputs& got, const Problem& problem, const HeaderRun& run) {
  return close(got, problem.forward(), run.dtype == FW_F64 ? kBound : kRingBound, kFloor);
}

TEST(Ring, WithAFoldAfterEveryTokenTheBitsAreThoseOfSteps) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule) || left_out(++turn, 3)) continue;
    const uint64_t seed = rule_seed(rule, 1);
    const Problem problem = problem_of(rule, seed);
    HeaderRun run = run_of(seed);
    HeaderRing ring;
    ring.tokens = 1;
    ring.spare_rows = static_cast<int64_t>(seed % 3);
    const ReferenceOutputs got = header_ring(problem, run, ring);
    EXPECT_TRUE(close(got, header_steps(problem, run), 0)) << describe(problem);
    EXPECT_TRUE(near_reference(got, problem, run)) << describe(problem);
    // Taken back or not: what is folded is what stays.
    ring.takes_back = !rule.uses_precond();
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << describe(problem);
    run.dtype = FW_F32;
    run.bf16_states = true;
    EXPECT_TRUE(close(header_ring(problem, run, ring), header_steps(problem, run), 0)) << describe(problem);
  }
}

TEST(Ring, HoweverTokensAreCutIntoCallsAndTakenBackTheBitsAreTheSame) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule) || left_out(++turn, 3)) continue;
    const uint64_t seed = rule_seed(rule, 2);
    const Problem problem = problem_of(rule, seed);
    HeaderRun run = run_of(seed);
    for (const int64_t tokens : {2, 5, 16}) {
      HeaderRing ring;
      ring.tokens = tokens;
      const ReferenceOutputs got = header_ring(problem, run, ring);
      EXPECT_TRUE(near_reference(got, problem, run)) << describe(problem) << " ring of " << tokens;
      for (const int64_t per_call : {int64_t{2}, std::min<int64_t>(tokens, 4)}) {
        ring.per_call = per_call;
        ring.spare_rows = per_call % 3;
        ring.takes_back = false;
        EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0))
            << describe(problem) << " ring of " << tokens << ", " << per_call << " a call";
        if (rule.uses_precond()) continue;
        ring.takes_back = true;
        EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0))
            << describe(problem) << " ring of " << tokens << ", " << per_call << " a call, taken back";
      }
    }
  }
}

TEST(Ring, ForwardCallsTakeWhatIsInIt) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule) || left_out(++turn, 3)) continue;
    const uint64_t seed = rule_seed(rule, 3);
    const Problem problem = problem_of(rule, seed);
    const HeaderRun run = run_of(seed);
    HeaderRing ring;
    ring.tokens = 6;
    ring.per_call = 3;
    ring.takes_back = seed % 2 == 0 && !rule.uses_precond();
    ring.forward_every = 4;  // six or more tokens of steps between two of them
    EXPECT_TRUE(near_reference(header_ring(problem, run, ring), problem, run)) << describe(problem);
  }
}

TEST(Ring, TensorsOfBf16AndLogits) {
  for (const char* name : {"kda", "precond_gated_deltanet", "gated_deltanet2"}) {
    const Problem problem = problem_of(preset(name).rule, 8);
    HeaderRun run;
    run.dtype = FW_F32;
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    HeaderRing ring;
    ring.tokens = 1;
    EXPECT_TRUE(close(header_ring(problem, run, ring), header_steps(problem, run), 0)) << name;
  }
}

TEST(Ring, ASequenceHasItsBitsAloneAndWithAnyNumberOfThreads) {
  ProblemOptions options;
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < 65; ++n) offsets.push_back(offsets.back() + n % 7);
  options.sequences = SeqLayout(offsets);
  options.H = options.HV = 2;
  options.K = options.V = 16;
  const int threads = fw_get_threads();
  for (const char* name : {"kda", "gated_deltanet", "deltanet"}) {
    const Problem problem = random_problem(preset(name).rule, options);
    HeaderRun run;
    run.dtype = FW_F32;
    HeaderRing ring;
    ring.tokens = 4;
    const ReferenceOutputs got = header_ring(problem, run, ring);
    fw_set_threads(1);
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
    fw_set_threads(3);
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
    fw_set_threads(threads);
    const size_t row = 2 * 16;
    for (const int64_t n : {5, 13, 64}) {
      const ReferenceOutputs alone = header_ring(slice_sequence(problem, n), run, ring);
      const auto begin = got.o.begin() + options.sequences.begin(n) * static_cast<int64_t>(row);
      EXPECT_EQ(alone.o, std::vector<double>(begin, begin + static_cast<int64_t>(alone.o.size()))) << name << n;
    }
  }
}

// Decays of 0 (a logarithm of -inf, or far below) forget all that came before; a quotient of them would be no number.
TEST(Ring, DecaysOfZeroForget) {
  for (const char* name : {"kda", "gated_deltanet", "mamba2", "gla"}) {
    ProblemOptions options = options_of(9);
    options.edge_decays = true;
    const Problem problem = random_problem(preset(name).rule, options);
    for (const fw_dtype dtype : {FW_F32, FW_F64}) {
      HeaderRun run;
      run.dtype = dtype;
      for (const int64_t tokens : {1, 8}) {
        HeaderRing ring;
        ring.tokens = tokens;
        EXPECT_TRUE(near_reference(header_ring(problem, run, ring), problem, run)) << name << tokens;
      }
    }
  }
}

// linear_attention of one head of one channel and one value: S += k v.
struct Server {
  explicit Server(int64_t slots, std::vector<int32_t> own)
      : states(static_cast<size_t>(slots), 100), at(std::move(own)) {
    const int64_t N = static_cast<int64_t>(at.size());
    ring.assign(states.size() * 2 * 2, std::nanf(""));
    ones.assign(at.size(), 1), o.assign(at.size(), 9), positions.assign(at.size(), 0);
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
    desc.B = N, desc.T = desc.H = desc.HV = desc.K = desc.V = 1;
    desc.scale = 1;
    desc.state_pool.slots = at.data();
    desc.state_pool.num_slots = slots;
    desc.ring.tokens = desc.ring.rows = 2;
    desc.ring.positions = positions.data();
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    const int64_t rows[4] = {N, 1, 1, 1}, pool[4] = {slots, 1, 1, 1}, ring_shape[4] = {slots, 1, 2, 2};
    in.q = in.k = in.v = fw_tensor_of(ones.data(), FW_F32, 4, rows);
    out.o = fw_tensor_of(o.data(), FW_F32, 4, rows);
    in.initial_state = out.final_state = fw_tensor_of(states.data(), FW_F32, 4, pool);
    out.ring = fw_tensor_of(ring.data(), FW_F32, 4, ring_shape);
  }
  std::string call(bool step = true) {
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    if (fw_workspace_query(&desc, &sizes) != FW_OK) return fw_last_error();
    std::vector<char> space(sizes.forward + 64);
    void* const aligned = space.data() + (64 - reinterpret_cast<uintptr_t>(space.data()) % 64) % 64;
    const fw_status status = step ? fw_step(&desc, &in, &out, aligned, sizes.forward)
                                  : fw_forward(&desc, &in, &out, nullptr, 0, aligned, sizes.forward);
    return status == FW_OK ? std::string() : std::string(fw_last_error());
  }
  std::vector<float> states, ring, ones, o;
  std::vector<int32_t> at, positions;
  fw_desc desc;
  fw_inputs in;
  fw_outputs out;
};

TEST(Ring, OfTenThousandSlotsThoseOfTheCallAreRead) {
  Server server(10000, {9999, -1, 17, 0});
  server.desc.state_pool.skipped = FW_SKIPPED_ZERO;
  server.positions = {0, 0, 1, 0};
  server.ring[17 * 4] = server.ring[17 * 4 + 1] = 3;  // w and u of the token before
  ASSERT_EQ(server.call(), "");
  EXPECT_EQ(server.o, (std::vector<float>{101, 0, 110, 101}));
  for (size_t slot = 0; slot < server.states.size(); ++slot)
    ASSERT_EQ(server.states[slot], slot == 17 ? 110 : 100) << "slot " << slot;
  for (size_t i = 0; i < server.ring.size(); ++i) {
    const size_t slot = i / 4;
    if ((slot == 9999 || slot == 0) && i % 4 < 2) {
      EXPECT_EQ(server.ring[i], 1) << i;
    } else if (slot != 17) {
      ASSERT_TRUE(std::isnan(server.ring[i])) << i;
    }
  }
}

TEST(Ring, ThePlanNamesIt) {
  Server server(3, {0});
  std::string text(fw_plan_text(&server.desc, nullptr, 0) + 1, '\0');
  fw_plan_text(&server.desc, text.data(), text.size());
  EXPECT_THAT(text, HasSubstr("ring: fw_step folds 2 tokens at once into the state, ring of 2 rows of 2 numbers\n"));
}

TEST(Ring, WhatItCannotBeIsRefused) {
  static const int32_t none[1] = {0};
  const auto message = [](auto&& change, bool step = true) {
    Server server(3, {1});
    change(server);
    return server.call(step);
  };
  EXPECT_EQ(message([](Server&) {}), "");
  EXPECT_EQ(message([](Server&) {}, false), "");
  EXPECT_THAT(message([](Server& s) { s.desc.ring.tokens = 0; }),
              HasSubstr("ring: expected rows 0, positions NULL and previous NULL without ring.tokens"));
  EXPECT_THAT(message([](Server& s) { s.desc.ring.tokens = 65; }), HasSubstr("ring.tokens: expected 1 to 64, got 65"));
  EXPECT_THAT(message([](Server& s) { s.desc.ring.positions = nullptr; }),
              HasSubstr("ring.positions: expected [N] positions with ring.tokens 2, got NULL"));
  EXPECT_THAT(message([](Server& s) { s.desc.ring.tokens = 3; }), HasSubstr("ring.rows: expected 3 to 4096"));
  EXPECT_THAT(message([](Server& s) { s.desc.ring.previous = none; }), HasSubstr("ring.rows: expected 3 to 4096"));
  EXPECT_THAT(message([](Server& s) {
                s.desc.rule.update = FW_UPDATE_DELTA;
                s.desc.rule.erase_write = FW_ERASE_WRITE_OWN;
              }),
              HasSubstr("ring.tokens: expected 0 with erase_write=own, whose step writes along two vectors, got 2"));
  EXPECT_THAT(message([](Server& s) {
                s.desc.speculation.token_slots = none;
                s.desc.speculation.columns = s.desc.speculation.num_slots = 1;
              }),
              HasSubstr("speculation.token_slots: expected NULL with ring.tokens"));
  EXPECT_THAT(message([](Server& s) {
                EXPECT_EQ(fw_rule_preset("precond_linear", &s.desc.rule), FW_OK);
                s.desc.ring.previous = none;
              }),
              HasSubstr("ring.previous: expected NULL with a preconditioner"));
  EXPECT_THAT(message([](Server& s) { s.out.final_state = {}; }),
              HasSubstr("final_state: expected the memory and strides of initial_state with ring.tokens 2"));
  EXPECT_THAT(message([](Server& s) { s.in.initial_state = {}; }), HasSubstr("initial_state: expected a tensor"));
  EXPECT_THAT(message([](Server& s) { s.out.ring = {}; }), HasSubstr("ring: expected a tensor with ring.tokens 2"));
  EXPECT_THAT(message([](Server& s) { s.out.ring.shape[3] = 3; }),
              HasSubstr("ring: shape: expected [3, 1, 2, 2], got [3, 1, 2, 3]"));
  EXPECT_THAT(message([](Server& s) { s.positions = {-1}; }), HasSubstr("ring.positions of sequence 0: expected 0 to"));
  EXPECT_THAT(message([](Server& s) {
                static const int32_t later[1] = {5};
                s.desc.ring.previous = later;
                s.desc.ring.rows = 4, s.out.ring.shape[2] = 4;
                s.out.ring.stride[0] = s.out.ring.stride[1] = 8;
                s.ring.assign(24, 0);
                s.out.ring.data = s.ring.data();
              }),
              HasSubstr("ring.previous of sequence 0: expected 0 to 0"));
  Server server(3, {1});
  server.desc.T = 3;
  server.desc.ring.rows = 9;
  EXPECT_THAT(server.call(), HasSubstr("ring.tokens: expected at least 3, the tokens of the longest sequence, got 2"));
  Server other(1, {0});
  fw_desc_init(&other.desc);
  EXPECT_EQ(fw_rule_preset("linear_attention", &other.desc.rule), FW_OK);
  other.desc.B = other.desc.T = other.desc.H = other.desc.HV = other.desc.K = other.desc.V = 1;
  EXPECT_THAT(other.call(), HasSubstr("ring: expected none without ring.tokens, got a tensor"));
}

}  // namespace
}  // namespace fw::testing
