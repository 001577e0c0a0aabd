// Decode that does not write the states (fw_desc.ring) on the device. Where every token is folded it has the bits of
// steps, else values of the reference. The cut into calls, tokens that are taken back and the kernel change no bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cuda/device_runs.h"
#ifdef FW_CUDA_EMULATION
#include "emulation/gpu.h"
#endif

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

bool has_ring(const Rule& rule) { return !rule.general_erase() && !rule.uses_erase_write() && !lacks(rule); }

ProblemOptions options_of(uint64_t seed) {
  ProblemOptions options;
  options.sequences = seed % 2 == 0 ? SeqLayout::uniform(2, 9) : SeqLayout({0, 8, 8, 9, 20});
  options.H = 1 + static_cast<int64_t>(seed % 2);
  options.HV = 2;
  options.K = seed % 5 == 0 ? 24 : seed % 5 == 1 ? 64 : seed % 5 == 2 ? 7 : seed % 5 == 3 ? 128 : 136;
  options.V = seed % 7 == 0 ? 40 : seed % 7 == 1 ? 5 : 8;
  options.initial_state = seed % 3 != 0;
  options.seed = seed;
  return options;
}
HeaderRun run_of(uint64_t seed) {
  HeaderRun run = device_run(FW_FORM_TOKEN);
  run.state_layout = seed % 11 < 5 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
  return run;
}

TEST(DeviceRing, WithAFoldAfterEveryTokenTheBitsAreThoseOfSteps) {
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule)) continue;
    const uint64_t seed = rule_seed(rule, 1);
    if (emulated() && seed % 3 != 0) continue;
    const Problem problem = random_problem(rule, options_of(seed / 3));
    HeaderRun run = run_of(seed / 3);
    HeaderRing ring;
    ring.tokens = 1;
    const ReferenceOutputs got = header_ring(problem, run, ring);
    EXPECT_TRUE(close(got, header_steps(problem, run), 0)) << describe(problem);
    EXPECT_TRUE(close(got, problem.forward(), kTokenBound, kTokenFloor)) << describe(problem);
    run.bf16_states = true;
    ring.takes_back = !rule.uses_precond();
    EXPECT_TRUE(close(header_ring(problem, run, ring), header_steps(problem, run), 0)) << describe(problem);
  }
}

TEST(DeviceRing, HoweverTokensAreCutIntoCallsAndTakenBackTheBitsAreTheSame) {
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule)) continue;
    const uint64_t seed = rule_seed(rule, 2);
    if (emulated() && seed % 3 != 0) continue;
    const ProblemOptions options = options_of(seed / 3);
    const Problem problem = random_problem(rule, options);
    HeaderRun run = run_of(seed / 3);
    HeaderRing ring;
    // 16 tokens with K above 128 have no room in a block of older GPUs.
    ring.tokens = seed % 2 == 0 || (options.K > 128 && cuda::current_arch() < cuda::Arch::kSm90) ? 5 : 16;
    const ReferenceOutputs got = header_ring(problem, run, ring);
    EXPECT_TRUE(close(got, problem.forward(), kTokenBound, kTokenFloor)) << describe(problem);
    ring.per_call = 3;
    ring.spare_rows = 1;
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << describe(problem);
    if (rule.uses_precond()) continue;
    ring.takes_back = true;
    run.device_seqlens = seed % 4 < 2;
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << describe(problem);
  }
}

// Five and more tokens have key warps that make several each.
TEST(DeviceRing, ManyTokensACall) {
  for (const char* name : {"kda", "gated_deltanet"}) {
    ProblemOptions options = options_of(4);
    options.sequences = SeqLayout({0, 23, 41});
    options.K = cuda::current_arch() < cuda::Arch::kSm90 ? 56 : 96;
    const Problem problem = random_problem(preset(name).rule, options);
    const HeaderRun run = run_of(6);
    HeaderRing ring;
    ring.tokens = 20;
    const ReferenceOutputs got = header_ring(problem, run, ring);
    EXPECT_TRUE(close(got, problem.forward(), kTokenBound, kTokenFloor)) << name;
    ring.per_call = 7;
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
    ring.takes_back = true;
    EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
  }
}

// One token of many heads: through shared memory, with the bits of the other kernel, which takes states [K, V].
TEST(DeviceRing, WholeHeads) {
  for (const char* name : {"kda", "gated_deltanet", "mamba2", "precond_gated_deltanet"}) {
    ProblemOptions options = options_of(7);
    options.sequences = SeqLayout::uniform(132, 5);
    options.H = options.HV = 2;
    options.K = 64;
    options.V = 20;
    const Problem problem = random_problem(preset(name).rule, options);
    for (const bool bf16 : {false, true}) {
      if (emulated() && bf16 && name[0] != 'k') continue;
      HeaderRun run = device_run(FW_FORM_TOKEN);
      run.state_layout = FW_STATE_V_FIRST;
      run.bf16_states = bf16;
      HeaderRing ring;
      ring.tokens = 3;
      std::string text;
      run.plan_text = &text;
      const ReferenceOutputs got = header_ring(problem, run, ring);
      EXPECT_THAT(text, HasSubstr("kernels forward: token/ring_fold -> "));
      if (!bf16) EXPECT_TRUE(close(got, problem.forward(), kTokenBound, kTokenFloor)) << name;
      run.state_layout = FW_STATE_K_FIRST;
      EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
      ring.takes_back = name[0] != 'p';
      run.state_layout = FW_STATE_V_FIRST;
      if (!emulated()) EXPECT_TRUE(close(header_ring(problem, run, ring), got, 0)) << name;
    }
  }
}

// A block's warps share groups of ring tokens, more than one each; rows of the ring in units of 16 bytes or not.
TEST(DeviceRing, WholeHeadsOfLongRings) {
  const EmulatedSms few(2);
  for (const char* name : {"kda", "gated_deltanet", "retnet", "deltanet"}) {
    ProblemOptions options = options_of(7);
    options.sequences = SeqLayout::uniform(emulated() ? 2 : 132, 23);
    options.H = options.HV = 2;
    options.K = name[0] == 'k' ? 128 : 64;
    options.V = name[0] == 'r' ? 18 : 40;
    const Problem problem = random_problem(preset(name).rule, options);
    HeaderRun run = device_run(FW_FORM_TOKEN);
    HeaderRing ring;
    ring.tokens = 21;
    for (const bool bf16 : {false, true}) {
      run.bf16_states = bf16;
      run.state_layout = FW_STATE_K_FIRST;
      const ReferenceOutputs want = header_ring(problem, run, ring);
      if (!bf16) EXPECT_TRUE(close(want, problem.forward(), kTokenBound, kTokenFloor)) << name;
      run.state_layout = FW_STATE_V_FIRST;
      EXPECT_TRUE(close(header_ring(problem, run, ring), want, 0)) << name;
      run.row_padding = 4;
      EXPECT_TRUE(close(header_ring(problem, run, ring), want, 0)) << name;
      HeaderRing other = ring;
      other.takes_back = true;
      other.spare_rows = 1;
      EXPECT_TRUE(close(header_ring(problem, run, other), want, 0)) << name;
      run.row_padding = 0;
    }
  }
}

TEST(DeviceRing, ForwardCallsTakeWhatIsInIt) {
  for (const Rule& rule : all_rules()) {
    if (!has_ring(rule)) continue;
    const uint64_t seed = rule_seed(rule, 3);
    if (emulated() && seed % 4 != 0) continue;
    const Problem problem = random_problem(rule, options_of(seed / 4));
    const HeaderRun run = run_of(seed / 4);
    HeaderRing ring;
    ring.tokens = 3;
    ring.per_call = 2;
    ring.takes_back = seed % 8 == 0 && !rule.uses_precond();
    ring.forward_every = 4;
    EXPECT_TRUE(close(header_ring(problem, run, ring), problem.forward(), kTokenBound, kTokenFloor))
        << describe(problem);
  }
}

TEST(DeviceRing, DecaysOfZeroForget) {
  for (const char* name : {"kda", "gated_deltanet"}) {
    ProblemOptions options = options_of(8);
    options.edge_decays = true;
    const Problem problem = random_problem(preset(name).rule, options);
    const HeaderRun run = run_of(8);
    HeaderRing ring;
    ring.tokens = 8;
    EXPECT_TRUE(close(header_ring(problem, run, ring), problem.forward(), kTokenBound, kTokenFloor)) << name;
  }
}

// Gates as logits are made by the kernel of the step or before it; narrow tensors.
TEST(DeviceRing, LogitsAndTensorsOfBf16) {
  for (const char* name : {"kda", "gated_deltanet2"}) {
    ProblemOptions options = options_of(4);
    const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
    HeaderRun run = run_of(4);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    HeaderRing ring;
    ring.tokens = 1;
    EXPECT_TRUE(close(header_ring(problem, run, ring), header_steps(problem, run), 0)) << name;
    options.gates = logits_of(preset(name).rule, GateActivation::kSoftplus);
    const Problem logits = random_problem(preset(name).rule, options);
    run.bf16 = HeaderRun::Bf16Tensors::kNone;
    EXPECT_TRUE(close(header_ring(logits, run, ring), header_steps(logits, run), 0)) << name;
    ring.tokens = 4;
    EXPECT_TRUE(close(header_ring(logits, run, ring), logits.forward(), kTokenBound, kTokenFloor)) << name;
  }
}

// What a plan of a call with a ring says; "": it takes it.
std::string message(const char* rule, int64_t tokens, int64_t T, int64_t K, bool step = true) {
  static const int32_t positions[1] = {0};
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_parse(rule, &desc.rule), FW_OK) << fw_last_error();
  desc.device = FW_DEVICE_CUDA;
  desc.B = 1, desc.T = T, desc.H = desc.HV = 1, desc.K = desc.V = K;
  desc.ring.tokens = tokens, desc.ring.rows = 2 * tokens, desc.ring.positions = positions;
  fw_plan* plan = nullptr;
  const fw_status status = fw_plan_create(&desc, step ? 1 : 0, &plan);
  fw_plan_destroy(plan);
  return status == FW_OK ? std::string() : std::string(fw_last_error());
}

#ifdef FW_CUDA_EMULATION
// The longest rings that a plan takes have room in the shared memory of that GPU, where the emulation would fail.
TEST(DeviceRing, WhatAPlanTakesHasRoom) {
  const cuda::emulation::Gpu before = cuda::emulation::gpu;
  for (const int major : {9, 8}) {
    cuda::emulation::gpu.major = major;
    for (const char* rule : {"kda", "gated_deltanet"}) {
      for (const int64_t K : {64, 128, 256}) {
        for (const int64_t per_call : {1, 8}) {
          HeaderRing ring;
          ring.per_call = per_call;
          ring.tokens = 64;
          const auto taken = [&] {
            return message(rule, ring.tokens, per_call, K).empty() &&
                   message(rule, ring.tokens, per_call, K, false).empty();
          };
          while (ring.tokens > per_call && !taken()) --ring.tokens;
          if (per_call == 1) EXPECT_GE(ring.tokens, 16) << major << " " << rule << " " << K;
          if (!taken()) continue;
          ProblemOptions options;
          options.sequences = SeqLayout::uniform(1, 2 * per_call);
          options.H = options.HV = 1;
          options.K = options.V = K;
          const Problem problem = random_problem(preset(rule).rule, options);
          EXPECT_TRUE(close(header_ring(problem, run_of(1), ring), problem.forward(), kTokenBound, kTokenFloor))
              << major << " " << describe(problem) << " " << ring.tokens;
        }
      }
    }
  }
  cuda::emulation::gpu = before;
}
#endif

TEST(DeviceRing, WhatItCannotBeIsRefused) {
  EXPECT_EQ(message("kda", 16, 1, 128), "");
  EXPECT_THAT(message("decay=channel gain=gate erase_state=previous", 16, 1, 128),
              HasSubstr("ring.tokens: expected 0 on CUDA"));
  EXPECT_THAT(message("kda", 64, 64, 256), HasSubstr("have room in a block's"));
  EXPECT_EQ(message("kda", 64, 64, 128, false), "");
}

}  // namespace
}  // namespace fw::testing
